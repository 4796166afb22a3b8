"""Prometheus text from the engine's counters, under llama-server's names and prefix.

A key is a metric name, or a name with labels as Prometheus writes them: `name{position="0"}`. Names that end
in `_total` are counters, all others gauges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "llamacpp:"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"

# Those of llama-server, and ours of the same kind: always there, zero until something happens.
HELP: Mapping[str, str] = {
    "prompt_tokens_total": "Prompt tokens processed, without those reused",
    "prompt_tokens_cached_total": "Prompt tokens reused from a slot",
    "prompt_seconds_total": "Time spent processing prompts",
    "tokens_predicted_total": "Tokens generated",
    "tokens_predicted_seconds_total": "Time spent generating tokens",
    "n_decode_total": "Decodes of the target",
    "n_tokens_max": "Longest sequence seen, prompt and answer",
    "spec_decode_num_draft_tokens_total": "Tokens drafted",
    "spec_decode_num_accepted_tokens_total": "Drafted tokens accepted by the target",
    "spec_decode_num_drafts_total": "Rounds with a draft",
    "prompt_tokens_seconds": "Prompt tokens per second, over all requests",
    "predicted_tokens_seconds": "Generated tokens per second, over all requests",
    "requests_processing": "Requests in a slot",
    "requests_deferred": "Requests waiting for a slot",
    "n_busy_slots_per_decode": "Busy slots per decode, on average",
    "slot_save_bytes_total": "Bytes of slot files written",
    "slot_save_seconds_total": "Time spent saving slots, syncing included",
    "slot_restore_bytes_total": "Bytes of slot files read",
    "slot_restore_seconds_total": "Time spent restoring slots",
}
# There where what they count is there.
MORE_HELP: Mapping[str, str] = {
    "requests_total": "Requests that came to their end",
    "n_steps_total": "Steps of the engine",
    "requests_postponed_for_room_total": "Prompts sent back to the queue, the shared KV buffer being full",
    "slots_emptied_for_room_total": "Idle slots emptied, the shared KV buffer being full",
    "step_overhead_us_per_slot": "Microseconds of a step outside llama, per slot: the median of the last 512",
    "step_overhead_us_per_slot_less_drafting": "The same, less 60 for each drafted token",
    "draft_prompt_tokens_total": "Tokens that a drafter read by itself, because its state was lost",
    "spec_drafter_drafts_total": "Rounds with a draft, by drafter",
    "spec_drafter_drafted_total": "Tokens drafted, by drafter",
    "spec_drafter_accepted_total": "Drafted tokens accepted, by drafter",
    "spec_step_cost_ms": "Expected milliseconds of a step over so many tokens",
    "spec_draft_token_ms": "Milliseconds of a drafted token, all slots together",
    "spec_rate_tokens_per_ms": "Tokens per millisecond and slot, of the last rounds",
    "spec_step_change_ms": "Milliseconds that another number of tokens than the step before costs more",
    "spec_steady_draft_length": "Draft length kept at present, where such changes are dear",
    "checkpoints": "Context checkpoints held",
    "checkpoint_bytes_memory": "Their bytes in memory",
    "checkpoint_bytes_files": "Their bytes in files",
    "checkpoints_taken_total": "Checkpoints taken",
    "checkpoints_applied_total": "Checkpoints gone back to",
    "checkpoints_evicted_total": "Checkpoints thinned out by the limits",
    "checkpoints_refused_total": "Checkpoints that did not load",
    "checkpoint_drafts_refused_total": "Checkpoints whose draft part did not load",
    "slot_saves_total": "Saves of a slot, by outcome",
    "slot_restores_total": "Restores of a slot, by outcome",
    "slot_restore_dropped_total": "Drafts and checkpoints of a file that the slot did not get",
}
_TEXTS = {**HELP, **MORE_HELP, PER_POSITION: "Drafted tokens accepted, by position in the draft"}
_KEY = re.compile(r"^(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)(?:\{(?P<labels>.*)\})?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')


def exposition(counters: Mapping[str, float]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Counters(counters))
    return generate_latest(registry)


class _Counters(Collector):
    def __init__(self, counters: Mapping[str, float]) -> None:
        self._values = {**dict.fromkeys(HELP, 0.0), **_rates(counters), **counters}
        if not any(key.startswith(PER_POSITION) for key in counters):
            self._values[f'{PER_POSITION}{{position="0"}}'] = 0.0

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, tuple[list[str], CounterMetricFamily | GaugeMetricFamily]] = {}
        for key, value in self._values.items():
            match = _KEY.match(key)
            assert match is not None, key
            name, labels = match["name"], dict(_LABEL.findall(match["labels"] or ""))
            if name not in families:
                families[name] = list(labels), _family(name, list(labels))
            names, family = families[name]
            family.add_metric([labels.get(label, "") for label in names], value)
        yield from (family for _, family in families.values())


def _family(name: str, labels: list[str]) -> CounterMetricFamily | GaugeMetricFamily:
    text = _TEXTS.get(name, name.replace("_", " "))
    if name.endswith("_total"):
        return CounterMetricFamily(PREFIX + name, text, labels=labels)
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _rates(counters: Mapping[str, float]) -> dict[str, float]:
    def rate(count: str, seconds: str) -> float:
        elapsed = counters.get(seconds, 0.0)
        return counters.get(count, 0.0) / elapsed if elapsed > 0 else 0.0

    return {
        "prompt_tokens_seconds": rate("prompt_tokens_total", "prompt_seconds_total"),
        "predicted_tokens_seconds": rate("tokens_predicted_total", "tokens_predicted_seconds_total"),
    }
