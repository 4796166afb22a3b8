"""The engine's results in llama-server's names: timings, usage, generation settings."""

from __future__ import annotations

from collections.abc import Mapping

from spec_server.engine.base import Finished, GenerateRequest, SamplingParams, Timings


def timings_json(timings: Timings) -> dict[str, object]:
    """The draft counts are there without a drafter too, as zeros: absence would read as 'not measured'."""
    return {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_token_ms": ratio(timings.prompt_ms, timings.prompt_n),
        "prompt_per_second": ratio(timings.prompt_n * 1e3, timings.prompt_ms),
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_token_ms": ratio(timings.predicted_ms, timings.predicted_n),
        "predicted_per_second": ratio(timings.predicted_n * 1e3, timings.predicted_ms),
        "draft_n": timings.draft_n,
        "draft_n_accepted": timings.draft_n_accepted,
        "draft_ms": timings.draft_ms,
        "draft_prompt_n": timings.draft_prompt_n,
        "n_drafts": timings.n_drafts,
        "n_decodes": timings.n_decodes,
        "accepted_per_pos": timings.accepted_per_pos,
        "drafters": {name: dict(counts) for name, counts in timings.drafters.items()},
    }


def usage_json(finished: Finished) -> dict[str, object]:
    n_predicted = finished.timings.predicted_n
    return {
        "completion_tokens": n_predicted,
        "prompt_tokens": finished.n_prompt,
        "total_tokens": finished.n_prompt + n_predicted,
        "prompt_tokens_details": {"cached_tokens": finished.timings.cache_n},
    }


def facts_json(finished: Finished, *, with_trace: bool) -> dict[str, object]:
    """What this server adds to every answer's last object."""
    facts: dict[str, object] = {
        "id_slot": finished.id_slot,
        "timings": timings_json(finished.timings),
        "cache": {"kind": finished.timings.cache_kind, "n_checkpoint": finished.timings.n_checkpoint},
    }
    if with_trace:
        facts["trace"] = [dict(entry) for entry in finished.trace]
    return facts


def sampling_json(sampling: SamplingParams) -> dict[str, object]:
    return {
        "seed": 0xFFFFFFFF if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typ_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def settings_json(request: GenerateRequest, finished: Finished, *, stream: bool) -> dict[str, object]:
    """`generation_settings` of llama-server's native answer: what was in force, the seed included."""
    speculative: Mapping[str, object] = {
        f"speculative.{name}": value
        for name in ("type", "n_max", "n_min", "p_min")
        if (value := getattr(request.speculative, name)) is not None
    }
    return {
        **sampling_json(request.sampling),
        "seed": finished.seed,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in request.sampling.logit_bias],
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "ignore_eos": request.ignore_eos,
        "stream": stream,
        **speculative,
    }


def ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0
