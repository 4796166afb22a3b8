"""POST /v1/chat/completions: messages through the model's template to tokens; OpenAI's form of the answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from spec_server.api.answer import respond
from spec_server.api.base import ApiOptions
from spec_server.api.bounds import check_generation
from spec_server.api.forms import Answer, Event
from spec_server.api.jsonio import json_response
from spec_server.api.offload import offload
from spec_server.api.prompts import n_common, tokenize_rendered
from spec_server.api.sampling import generate_request
from spec_server.api.schemas import ChatBody, ChatMessage, parse
from spec_server.api.templates import ChatTemplate
from spec_server.api.wire import facts_json, usage_json
from spec_server.engine.base import Delta, Engine, Finished, Started
from spec_server.engine.errors import InvalidRequest

Message = Mapping[str, object]

MANY_MESSAGES = 200  # a template takes some microseconds for each: so many are not rendered on the event loop


@dataclass(frozen=True, slots=True)
class Rendered:
    """`prefix` is the text before the last user message, empty where there is none."""

    text: str
    prefix: str


async def chat_completions(
    http: Request, engine: Engine, template: ChatTemplate, options: ApiOptions
) -> Response:
    body = parse(ChatBody, await http.body(), partial(check_generation, engine=engine))
    rendered = await _rendered(body, template, options)
    prompt = await tokenize_rendered(engine, rendered.text)
    boundaries = await checkpoint_boundaries(engine, rendered, prompt)
    request = generate_request(body, prompt, boundaries, engine, options)
    form = ChatForm(engine.model.alias, options, body)
    return await respond(http, body, request, form, engine, options)


async def apply_template(http: Request, template: ChatTemplate, options: ApiOptions) -> Response:
    body = parse(ChatBody, await http.body())
    return json_response({"prompt": (await _rendered(body, template, options)).text})


async def _rendered(body: ChatBody, template: ChatTemplate, options: ApiOptions) -> Rendered:
    if len(body.messages) < MANY_MESSAGES:
        return render(body, template, options)
    return await offload.run(partial(render, body, template, options))


def render(body: ChatBody, template: ChatTemplate, options: ApiOptions) -> Rendered:
    """A trailing assistant message is the beginning of the answer: the model goes on where it ends."""
    messages = [_plain(message) for message in body.messages]
    kwargs = {**options.template_kwargs, **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    opens, prefill = body.add_generation_prompt, ""
    wants_prefill = body.continue_final_message or (options.prefill_assistant and opens)
    if wants_prefill and messages[-1]["role"] == "assistant":
        prefill, opens = _prefill(messages), True
        messages = messages[:-1]
    text = template.render(messages, add_generation_prompt=opens, kwargs=kwargs) + prefill
    return Rendered(text, _prefix(messages, text, template, kwargs))


def _plain(message: ChatMessage) -> Message:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)  # joined as llama-server joins them
    elif content is None and message.role != "assistant":
        raise InvalidRequest(f"messages: a {message.role} message without content", param="messages")
    return {**(message.model_extra or {}), "role": message.role, "content": content or ""}


def _prefill(messages: Sequence[Message]) -> str:
    if len(messages) == 1:
        raise InvalidRequest("messages: nothing comes before the assistant's message", param="messages")
    if messages[-2]["role"] == "assistant":
        message = "messages: at most one assistant message may stand at the end"
        raise InvalidRequest(message, param="messages")
    return str(messages[-1]["content"])


def _prefix(
    messages: Sequence[Message], text: str, template: ChatTemplate, kwargs: Mapping[str, object]
) -> str:
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    if last_user == 0:
        return ""
    try:
        prefix = template.render(messages[:last_user], add_generation_prompt=False, kwargs=kwargs)
    except InvalidRequest:
        return ""  # a template may refuse a conversation that ends there; it is a hint, nothing more
    return prefix if text.startswith(prefix) else ""


async def checkpoint_boundaries(engine: Engine, rendered: Rendered, prompt: Sequence[int]) -> tuple[int, ...]:
    """Prompt lengths that a changed last message leaves intact; compared, as tokens may merge there."""
    if not rendered.prefix or not engine.props().get("slot_checkpoints", True):
        return ()
    n_prefix = n_common(await tokenize_rendered(engine, rendered.prefix), prompt)
    return (n_prefix,) if 0 < n_prefix < len(prompt) else ()


class ChatForm:
    """OpenAI's chat.completion and chat.completion.chunk."""

    terminator = b"data: [DONE]\n\n"

    def __init__(self, model: str, options: ApiOptions, body: ChatBody) -> None:
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._with_trace = options.trace if body.trace is None else body.trace
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": options.build_info,
        }
        # One object for all chunks of a stream: only its text changes.
        self._delta: dict[str, str] = {"content": ""}
        self._chunk = {**self._head, "choices": [_choice(self._delta, None)]}

    def opening(self, started: Started) -> Sequence[Event]:
        delta = {"role": "assistant", "content": ""}
        return ({**self._head, "choices": [_choice(delta, None)], "id_slot": started.id_slot},)

    def chunk(self, delta: Delta) -> Event | None:
        if not delta.text:
            return None
        self._delta["content"] = delta.text
        return self._chunk

    def closing(self, finished: Finished) -> Sequence[Event]:
        facts = facts_json(finished, with_trace=self._with_trace)
        last = {**self._head, "choices": [_choice({}, finished.reason)], **facts}
        if not self._with_usage:
            return (last,)
        return last, {**self._head, "choices": [], "usage": usage_json(finished)}

    def whole(self, answer: Answer) -> Event:
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": answer.finished.reason}
        return {
            **self._head,
            "choices": [choice],
            "usage": usage_json(answer.finished),
            **facts_json(answer.finished, with_trace=self._with_trace),
        }


def _choice(delta: Mapping[str, str], finish_reason: str | None) -> dict[str, object]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}
