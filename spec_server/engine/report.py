"""What /slots and /metrics say, read from the core's plain values; safe to call from another thread."""

from __future__ import annotations

from collections.abc import Mapping

from spec_server.engine.checkpoints import bytes_in_memory
from spec_server.engine.core import EngineCore
from spec_server.engine.slot import Slot, SlotState
from spec_server.engine.spill import is_in_memory


def slot_facts(core: EngineCore, slot: Slot) -> Mapping[str, object]:
    """One entry of /slots."""
    task = slot.task
    facts: dict[str, object] = {
        "id": slot.id,
        "n_ctx": core.target.n_ctx_seq,
        "speculative": core.drafter.n_max > 0,
        "is_processing": slot.state is not SlotState.IDLE,
        "state": slot.state.value,
        "n_tokens": len(slot.tokens),
        **checkpoint_facts(slot),
    }
    if task is not None:
        facts["next_token"] = {
            "n_decoded": task.n_predicted,
            "n_remain": task.remaining(core.target.n_ctx_seq, len(slot.tokens)),
        }
        facts["draft_n"], facts["draft_n_accepted"] = task.n_drafted, task.n_accepted
        facts["drafters"] = {name: count.report() for name, count in list(task.drafters.items())}
    return facts


def checkpoint_facts(slot: Slot) -> Mapping[str, object]:
    checkpoints = list(slot.checkpoints)
    in_memory = bytes_in_memory(checkpoints)
    return {
        "checkpoints": [
            {
                "n_tokens": c.n_tokens,
                "pos_min": c.pos_min,
                "pos_max": c.pos_max,
                "n_bytes": c.state.n_bytes,
                "in": "memory" if is_in_memory(c.state) else "file",
            }
            for c in checkpoints
        ],
        "checkpoint_bytes_memory": in_memory,
        "checkpoint_bytes_files": sum(c.state.n_bytes for c in checkpoints) - in_memory,
    }


def checkpoint_counters(core: EngineCore) -> Mapping[str, float]:
    """Sums over all slots, and what became of checkpoints so far."""
    checkpoints = [c for slot in core.slots for c in list(slot.checkpoints)]
    in_memory = bytes_in_memory(checkpoints)
    counts = core.checkpoints.counts
    return {
        "checkpoints": len(checkpoints),
        "checkpoint_bytes_memory": in_memory,
        "checkpoint_bytes_files": sum(c.state.n_bytes for c in checkpoints) - in_memory,
        "checkpoints_taken_total": counts.taken,
        "checkpoints_applied_total": counts.applied,
        "checkpoints_refused_total": counts.refused,
        "checkpoint_drafts_refused_total": counts.draft_refused,
        "checkpoints_evicted_total": counts.evicted,
    }


def counters(core: EngineCore) -> Mapping[str, float]:
    """Monotone counts (`..._total`) and gauges by metric name; labels as in `name{label="value"}`."""
    stats = core.stats
    busy = sum(s.task is not None for s in core.slots)
    plain, net = stats.overhead_per_slot()
    values: dict[str, float] = {
        "prompt_tokens_total": stats.n_prompt,
        "prompt_tokens_cached_total": stats.n_cached,
        "prompt_seconds_total": stats.prompt_ms / 1e3,
        "tokens_predicted_total": stats.n_predicted,
        "tokens_predicted_seconds_total": stats.predicted_ms / 1e3,
        "requests_total": stats.n_requests,
        "n_decode_total": core.target.n_decodes,
        "n_steps_total": stats.n_steps,
        "n_tokens_max": stats.n_tokens_max,
        "n_busy_slots_per_decode": stats.n_busy / max(1, stats.n_steps),
        "requests_processing": busy,
        "requests_deferred": len(core.line),
        "spec_decode_num_drafts_total": stats.n_drafts,
        "spec_decode_num_draft_tokens_total": stats.n_drafted,
        "spec_decode_num_accepted_tokens_total": stats.n_accepted,
        "draft_prompt_tokens_total": stats.n_draft_prompt,
        **checkpoint_counters(core),
        "step_overhead_us_per_slot": plain,
        "step_overhead_us_per_slot_less_drafting": net,
    }
    for i, n in enumerate(list(stats.accepted_per_pos)):
        values[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] = n
    values.update(dict(stats.events))
    values.update(draft_length_gauges(core))
    return values


def draft_length_gauges(core: EngineCore) -> Mapping[str, float]:
    """What the draft length rule goes by; empty where lengths are fixed."""
    policy = core.speculation.policy
    if policy is None:
        return {}
    costs = {f'spec_step_cost_ms{{tokens="{n}"}}': policy.pace.costs.ms(n) for n in range(1, 18)}
    drafting = {
        f'spec_draft_token_ms{{drafter="{name}"}}': ms for name, ms in dict(policy.pace.draft_ms).items()
    }
    return {
        **costs,
        **drafting,
        "spec_rate_tokens_per_ms": policy.pace.rate,
        "spec_step_change_ms": policy.pace.costs.change_ms,
        "spec_steady_draft_length": policy.steady.n,
    }
