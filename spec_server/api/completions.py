"""POST /completion in llama-server's form, /v1/completions in OpenAI's, and the tokenizer's two routes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from spec_server.api.answer import respond
from spec_server.api.base import ApiOptions
from spec_server.api.bounds import check_generation, check_tokens
from spec_server.api.forms import Answer, Event
from spec_server.api.jsonio import json_response
from spec_server.api.offload import offload
from spec_server.api.prompts import prompt_tokens, token_id
from spec_server.api.sampling import generate_request
from spec_server.api.schemas import CompletionBody, DetokenizeBody, TokenizeBody, parse
from spec_server.api.wire import facts_json, settings_json, usage_json
from spec_server.engine.base import Delta, Engine, Finished, GenerateRequest, Started


async def completion(http: Request, engine: Engine, options: ApiOptions) -> Response:
    body = parse(CompletionBody, await http.body(), partial(check_generation, engine=engine))
    prompt = await prompt_tokens(engine, body.prompt)
    request = generate_request(body, prompt, (), engine, options)
    return await respond(http, body, request, NativeForm(engine, request, body), engine, options)


async def text_completions(http: Request, engine: Engine, options: ApiOptions) -> Response:
    body = parse(CompletionBody, await http.body(), partial(check_generation, engine=engine))
    prompt = await prompt_tokens(engine, body.prompt)
    request = generate_request(body, prompt, (), engine, options)
    form = TextForm(engine.model.alias, options, body)
    return await respond(http, body, request, form, engine, options)


async def tokenize(http: Request, engine: Engine) -> Response:
    body = parse(TokenizeBody, await http.body(), check_tokens)
    tokens = await prompt_tokens(
        engine,
        body.content,
        add_special=body.add_special,
        parse_special=body.parse_special,
        param="content",
        is_prompt=False,
    )
    if body.with_pieces:
        pieces = await offload.run(
            lambda: [{"id": token, "piece": engine.detokenize([token])} for token in tokens]
        )
        return json_response({"tokens": pieces})
    return json_response({"tokens": tokens})


async def detokenize(http: Request, engine: Engine) -> Response:
    body = parse(DetokenizeBody, await http.body(), check_tokens)
    n_vocab = engine.model.n_vocab

    def convert() -> str:
        tokens = [token_id(token, n_vocab, f"tokens[{index}]") for index, token in enumerate(body.tokens)]
        return engine.detokenize(tokens)

    return json_response({"content": await offload.run(convert)})


class NativeForm:
    """llama-server's own; a stream of it has no end marker but the object with `stop` true."""

    terminator = b""

    def __init__(self, engine: Engine, request: GenerateRequest, body: CompletionBody) -> None:
        self._engine = engine
        self._request = request
        self._prompt = body.prompt
        self._stream = bool(body.stream)
        self._return_tokens = bool(body.return_tokens)
        self._has_new_line = False
        self._chunk: dict[str, object] = {
            "index": 0,
            "content": "",
            "tokens": (),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": 0,
            "tokens_evaluated": len(request.prompt),
        }
        self._n_predicted = 0

    def opening(self, started: Started) -> Sequence[Event]:
        self._chunk["id_slot"] = started.id_slot
        return ()

    def chunk(self, delta: Delta) -> Event | None:
        self._n_predicted += len(delta.tokens)
        self._has_new_line = self._has_new_line or "\n" in delta.text
        self._chunk["content"] = delta.text
        self._chunk["tokens"] = delta.tokens
        self._chunk["tokens_predicted"] = self._n_predicted
        return self._chunk

    def closing(self, finished: Finished) -> Sequence[Event]:
        return (self._last(finished, "", ()),)

    def whole(self, answer: Answer) -> Event:
        self._has_new_line = "\n" in answer.text
        return self._last(answer.finished, answer.text, answer.tokens if self._return_tokens else ())

    def _last(self, finished: Finished, content: str, tokens: Sequence[int]) -> Event:
        n_predicted = finished.timings.predicted_n
        # Not before: nothing shall keep the first token waiting.
        prompt = (
            self._prompt if isinstance(self._prompt, str) else self._engine.detokenize(self._request.prompt)
        )
        return {
            "index": 0,
            "content": content,
            "tokens": tokens,
            "stop": True,
            "model": self._engine.model.alias,
            "tokens_predicted": n_predicted,
            "tokens_evaluated": finished.n_prompt,
            "generation_settings": settings_json(self._request, finished, stream=self._stream),
            "prompt": prompt,
            "has_new_line": self._has_new_line,
            "truncated": finished.truncated,
            "stop_type": finished.stop_type,
            "stopping_word": finished.stopping_word,
            # The last token was sampled and never decoded.
            "tokens_cached": finished.n_prompt + max(n_predicted - 1, 0),
            **facts_json(finished, with_trace=self._request.trace),
            "usage": usage_json(finished),
        }


class TextForm:
    """OpenAI's text_completion."""

    terminator = b"data: [DONE]\n\n"

    def __init__(self, model: str, options: ApiOptions, body: CompletionBody) -> None:
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._with_trace = options.trace if body.trace is None else body.trace
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": options.build_info,
        }
        self._choice = _choice("", None)
        self._chunk = {**self._head, "choices": [self._choice]}

    def opening(self, started: Started) -> Sequence[Event]:
        return ()

    def chunk(self, delta: Delta) -> Event | None:
        if not delta.text:
            return None
        self._choice["text"] = delta.text
        return self._chunk

    def closing(self, finished: Finished) -> Sequence[Event]:
        facts = facts_json(finished, with_trace=self._with_trace)
        last = {**self._head, "choices": [_choice("", finished.reason)], **facts}
        if not self._with_usage:
            return (last,)
        return last, {**self._head, "choices": [], "usage": usage_json(finished)}

    def whole(self, answer: Answer) -> Event:
        return {
            **self._head,
            "choices": [_choice(answer.text, answer.finished.reason)],
            "usage": usage_json(answer.finished),
            **facts_json(answer.finished, with_trace=self._with_trace),
        }


def _choice(text: str, finish_reason: str | None) -> dict[str, object]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
