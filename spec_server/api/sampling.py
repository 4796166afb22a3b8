"""From a checked body to the engine's GenerateRequest: defaults, aliases, token ids checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spec_server.api.base import ApiOptions
from spec_server.api.ids import number_of
from spec_server.api.schemas import GenerationBody
from spec_server.engine.base import Engine, GenerateRequest, ModelInfo, SamplingParams, SpeculativeParams
from spec_server.engine.errors import InvalidRequest

_COLD = 1e-6  # below, dividing by it overflows, and only the best token is left anyway
RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's "choose one"
_SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def generate_request(
    body: GenerationBody,
    prompt: Sequence[int],
    boundaries: tuple[int, ...],
    engine: Engine,
    options: ApiOptions,
) -> GenerateRequest:
    if not prompt:
        raise InvalidRequest("prompt: it has no tokens", param="prompt")
    return GenerateRequest(
        prompt=prompt,
        max_tokens=_max_tokens(body, options),
        sampling=sampling_params(body, options.sampling, engine.model),
        speculative=SpeculativeParams(
            type=body.speculative.type,
            n_max=body.speculative.n_max,
            n_min=body.speculative.n_min,
            p_min=body.speculative.p_min,
        ),
        stop=_stop(body),
        ignore_eos=bool(body.ignore_eos),
        id_slot=_id_slot(body),
        cache_prompt=options.cache_prompt if body.cache_prompt is None else body.cache_prompt,
        boundaries=boundaries,
        trace=options.trace if body.trace is None else body.trace,
    )


def sampling_params(body: GenerationBody, defaults: SamplingParams, model: ModelInfo) -> SamplingParams:
    given: dict[str, object] = {
        name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None
    }
    if body.temperature is not None and body.temperature < _COLD:
        given["temperature"] = 0.0
    if body.typical_p is not None:
        given["typ_p"] = body.typical_p
    if body.repeat_last_n is not None:
        given["repeat_last_n"] = model.n_ctx_seq if body.repeat_last_n < 0 else body.repeat_last_n
    if body.seed is not None:
        folded = body.seed & 0xFFFFFFFF  # llama-server keeps 32 bits of a longer seed
        given["seed"] = None if folded == RANDOM_SEED else folded
    if body.logit_bias:
        given["logit_bias"] = logit_bias(body.logit_bias, model.n_vocab)
    return replace(defaults, **given) if given else defaults  # type: ignore[arg-type]


def logit_bias(
    bias: dict[str, float | bool] | list[tuple[int, float | bool]], n_vocab: int
) -> tuple[tuple[int, float], ...]:
    pairs = bias.items() if isinstance(bias, dict) else bias
    return tuple((_token(key, n_vocab), _bias(value)) for key, value in pairs)


def _token(key: str | int, n_vocab: int) -> int:
    token = number_of(key) if isinstance(key, str) else key
    if token is None:
        raise InvalidRequest(f"logit_bias: {key!r} is not a token id", param="logit_bias")
    if not 0 <= token < n_vocab:
        message = f"logit_bias: token id {token} is not in 0..{n_vocab - 1}"
        raise InvalidRequest(message, param="logit_bias")
    return token


def _bias(value: float | bool) -> float:
    if value is True:
        raise InvalidRequest("logit_bias: a bias is a number, or false to ban the token", param="logit_bias")
    if value is not False and abs(value) > 1e6:
        raise InvalidRequest("logit_bias: a bias lies between -1000000 and 1000000", param="logit_bias")
    return float("-inf") if value is False else float(value)


def _max_tokens(body: GenerationBody, options: ApiOptions) -> int:
    for given in (body.n_predict, body.max_completion_tokens, body.max_tokens):
        if given is not None:
            return given
    return options.max_tokens


def _stop(body: GenerationBody) -> tuple[str, ...]:
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return tuple(word for word in given if word)


def _id_slot(body: GenerationBody) -> int:
    if body.id_slot is not None and body.slot_id is not None and body.id_slot != body.slot_id:
        raise InvalidRequest("id_slot: slot_id, its alias, names another slot", param="id_slot")
    given = body.id_slot if body.id_slot is not None else body.slot_id
    return -1 if given is None else given
