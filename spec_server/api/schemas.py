"""Request bodies: names, kinds and ranges of the fields that are understood, and what is refused by name.

The only pydantic of the API; nothing of it leaves the package.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeVar

import orjson
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from spec_server.engine.errors import InvalidRequest

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
StopWord = Annotated[str, Field(max_length=1000)]
StopList = Annotated[list[StopWord], Field(max_length=64)]
Body = TypeVar("Body", bound="RequestBody")


_LARGEST = 1e6  # of temperatures, penalties and biases: sums of them stay far inside a 32-bit float


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, populate_by_name=True)


class StreamOptions(RequestBody):
    include_usage: bool | None = None


class SpeculativeBody(RequestBody):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)  # a mistyped override would do nothing

    type: str | None = None
    n_max: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    n_min: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    p_min: Fraction | None = None


class GenerationBody(RequestBody):
    """What every generating endpoint takes. None: the server's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n_predict: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=_LARGEST)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    typical_p: Fraction | None = Field(None, validation_alias=AliasChoices("typical_p", "typ_p"))
    repeat_penalty: Annotated[float, Field(ge=1 / _LARGEST, le=_LARGEST)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    presence_penalty: Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int, float | bool]] | None = None
    stop: StopWord | StopList | None = None
    ignore_eos: bool | None = None
    id_slot: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    slot_id: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    cache_prompt: bool | None = None
    speculative: SpeculativeBody = SpeculativeBody()
    trace: bool | None = None
    sse_ping_interval: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _nest_dotted(cls, data: object) -> object:
        """llama-server's flat form: {"speculative.n_max": 2}."""
        if not isinstance(data, dict):
            return data
        dotted = {
            key.partition(".")[2]: value for key, value in data.items() if key.startswith("speculative.")
        }
        nested = data.get("speculative", {})
        if dotted and (nested is None or isinstance(nested, dict)):
            data = {**data, "speculative": {**(nested or {}), **dotted}}
        elif nested is None:
            data = {key: value for key, value in data.items() if key != "speculative"}
        return data


class TextPart(RequestBody):
    type: Literal["text"]
    text: str


_WITH_EYES_OR_EARS = {
    **dict.fromkeys(("image_url", "input_image", "image"), "images"),
    **dict.fromkeys(("input_audio", "audio"), "sounds"),
    **dict.fromkeys(("video_url", "input_video", "video"), "videos"),
    **dict.fromkeys(("file", "input_file"), "files"),
}


class ChatMessage(RequestBody):
    """Whatever else a message holds goes to the template as it came."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, content: object) -> object:
        """In one sentence; of a union pydantic names the fault of each member."""
        parts = content if isinstance(content, list) else []
        for kind in (part.get("type") for part in parts if isinstance(part, dict)):
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"{_WITH_EYES_OR_EARS.get(kind, f'parts of type {kind}')} are not supported")
        if not isinstance(content, str | list | None) or not all(map(_is_text_part, parts)):
            raise ValueError('it takes a string, or a list of {"type": "text", "text": STRING}')
        return content


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = None


class CompletionBody(GenerationBody):
    prompt: str | list[object]
    return_tokens: bool | None = None


class SlotFileBody(RequestBody):
    filename: Annotated[str, Field(min_length=1)]


class TokenizeBody(RequestBody):
    content: str | list[object]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(RequestBody):
    tokens: list[StrictInt]


def _is_off(*neutral: object) -> Callable[[object], bool]:
    return lambda value: value is None or any(value == item and type(value) is type(item) for item in neutral)


def _is_zero(value: object) -> bool:
    return value is None or value is False or (isinstance(value, int | float) and value == 0)


def _is_one(value: object) -> bool:
    return value is None or value == 1


def _is_negative_or_zero(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and value <= 0)


def _is_text_format(value: object) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


# llama-server's own order; those of _OFF_HERE cannot be switched on, so that leaving them out changes nothing.
_CHAIN = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
}
_CHAIN |= {"x": "xtc", "t": "temperature"}
_OFF_HERE = ("dry", "top_n_sigma", "xtc")


def _is_default_chain(value: object) -> bool:
    if isinstance(value, str):
        value = [_CHAIN.get(letter) for letter in value]
    if not isinstance(value, list):
        return value is None
    return [name for name in value if name not in _OFF_HERE] == [
        name for name in _CHAIN.values() if name not in _OFF_HERE
    ]


# Of fields that take several kinds of value, what they take; pydantic would speak of one kind only.
TAKES: Mapping[str, str] = {
    "stop": "a string, or a list of at most 64 strings of at most 1,000 characters each",
    "logit_bias": "an object of token ids and biases, or a list of [token id, bias] pairs; "
    "a bias is a number, or false to ban the token",
    "prompt": "a string, or a list of token ids and strings",
    "samplers": f'the default order alone, "{"".join(_CHAIN)}" or [{", ".join(_CHAIN.values())}]',
}

# What would change the answer and is not offered: refused unless the value asks for nothing.
UNSUPPORTED: Mapping[str, Callable[[object], bool]] = {
    "n": _is_one,
    "n_cmpl": _is_one,
    "best_of": _is_one,
    "logprobs": _is_zero,
    "top_logprobs": _is_zero,
    "n_probs": _is_zero,
    "post_sampling_probs": _is_zero,
    "tools": _is_off([]),
    "functions": _is_off([]),
    "tool_choice": _is_off("auto", "none"),
    "function_call": _is_off("auto", "none"),
    "response_format": _is_text_format,
    "grammar": _is_off(""),
    "grammar_lazy": _is_zero,
    "json_schema": _is_off(),
    "guided_json": _is_off(),
    "guided_regex": _is_off(),
    "guided_choice": _is_off([]),
    "guided_grammar": _is_off(""),
    "modalities": _is_off(["text"]),
    "audio": _is_off(),
    "image_data": _is_off([]),
    "web_search_options": _is_off(),
    "suffix": _is_off(""),
    "echo": _is_zero,
    "lora": _is_off([]),
    "samplers": _is_default_chain,
    "mirostat": _is_zero,
    "dynatemp_range": _is_zero,
    "xtc_probability": _is_zero,
    "dry_multiplier": _is_zero,
    "top_n_sigma": _is_negative_or_zero,
    "adaptive_target": _is_negative_or_zero,
    "min_keep": _is_zero,
    "min_tokens": _is_zero,
    "repetition_penalty": _is_one,
    "bad_words": _is_off([]),
    "stop_token_ids": _is_off([]),
    "n_indent": _is_zero,
    "t_max_predict_ms": _is_negative_or_zero,
    "response_fields": _is_off([]),
    "use_beam_search": _is_zero,
}

# Names of our own that are quietly lost when they are mistyped, the answer then coming from somewhere else.
_GUARDED = ("id_slot", "slot_id", "cache_prompt", "speculative")
# Comparing names takes long: no more of them, and no longer ones, than somebody would mistype.
_MOST_UNKNOWN, _LONGEST_NAME = 256, 64


def _anything(data: Mapping[str, object]) -> None:
    pass


def parse(model: type[Body], raw: bytes, check: Callable[[Mapping[str, object]], None] = _anything) -> Body:
    """Bytes of a request to its checked body; InvalidRequest names what is wrong, and so do the handlers for
    ValidationError. `check` sees the JSON first and may refuse it before each item of a long list is validated."""
    data = parse_object(raw)
    check(data)
    if issubclass(model, GenerationBody):
        _refuse_unsupported(data)
        _refuse_mistyped(data, model)
    return model.model_validate(data)


def parse_object(raw: bytes) -> dict[str, object]:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        what = "the body is empty" if not raw.strip() else f"the body is not JSON: {error}"
        raise InvalidRequest(what, param="body") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the body is not a JSON object", param="body")
    return data


def _refuse_unsupported(data: Mapping[str, object]) -> None:
    for name in data.keys() & UNSUPPORTED.keys():
        if not UNSUPPORTED[name](data[name]):
            what = f"it takes {TAKES[name]}" if name in TAKES else "not supported by this server"
            raise InvalidRequest(f"{name}: {what}", param=name)


def _refuse_mistyped(data: Mapping[str, object], model: type[BaseModel]) -> None:
    unknown = (name for name in data if name not in model.model_fields and name not in UNSUPPORTED)
    for name in itertools.islice(unknown, _MOST_UNKNOWN):
        head, dot, tail = name.partition(".")
        if len(head) > _LONGEST_NAME or (dot and head == "speculative"):
            continue
        plain = head.replace("-", "_").lower()
        near = difflib.get_close_matches(plain, ("speculative",) if dot else _GUARDED, n=1, cutoff=0.75)
        if near or (not dot and (plain == "slot" or plain.replace("_", "") in ("idslot", "slotid"))):
            wanted = "id_slot" if not near or near[0] == "slot_id" else near[0] + dot + tail[:_LONGEST_NAME]
            raise InvalidRequest(f"{name[:200]}: unknown field; did you mean {wanted}?", param=name[:200])
