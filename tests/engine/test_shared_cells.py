"""One KV buffer for all slots: more requests than it holds at once are served one after the other, whole."""

from __future__ import annotations

import numpy as np
import pytest

from eval.models import DRAFTER
from spec_server.engine.base import SamplingParams
from spec_server.engine.errors import ContextExceeded, GenerationFailed
from tests.engine.harness import Setup, core_of, drain, filler, model_of, request, run, submit

SHARED = Setup(DRAFTER, n_slots=4, n_ctx=64, kv_unified=True, n_ubatch=32)  # 256 cells for all


def test_prompts_that_do_not_fit_at_once_wait_and_no_answer_is_cut() -> None:
    prompts = [filler(model_of(DRAFTER), 150, seed) for seed in range(4)]
    with core_of(SHARED) as core:
        turns = [submit(core, request(p, 6, ignore_eos=True)) for p in prompts]
        drain(core)
        assert [t.error for t in turns] == [None] * 4
        assert [(t.timings.predicted_n, t.finished.truncated) for t in turns] == [(6, False)] * 4
        assert core.stats.events["requests_postponed_for_room_total"] > 0


def test_an_idle_slot_gives_its_cells_up_first() -> None:
    model = model_of(DRAFTER)
    with core_of(SHARED) as core:
        run(core, request(filler(model, 150, 1), 4, id_slot=0))
        (turn,) = run(core, request(filler(model, 200, 2), 4, id_slot=1, ignore_eos=True))
        assert turn.timings.predicted_n == 4
        assert len(core.slots[0].tokens) == 0
        assert core.stats.events["requests_postponed_for_room_total"] == 0


def test_answers_that_outgrow_the_cells_together_end_at_the_context() -> None:
    model = model_of(DRAFTER)
    with core_of(SHARED) as core:
        turns = [submit(core, request(filler(model, 40, seed), 200, ignore_eos=True)) for seed in range(4)]
        drain(core)
        assert all(t.error is None for t in turns)
        assert any(t.finished.truncated for t in turns)
        assert not any(isinstance(t.error, ContextExceeded) for t in turns)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, logit_bias=((5, 1e39), (6, 1e39))),
        SamplingParams(temperature=0.0, presence_penalty=-3e38, frequency_penalty=-3e38),
        SamplingParams(temperature=0.8, top_p=1.0, min_p=0.0, logit_bias=((5, 1e39),)),
        SamplingParams(temperature=1e-38, top_k=0, top_p=1.0, min_p=0.0, seed=3),
        SamplingParams(temperature=0.0, repeat_penalty=1e-40),
    ],
)
def test_numbers_that_overflow_harm_at_most_their_own_request(params: SamplingParams) -> None:
    model = model_of(DRAFTER)
    with core_of(SHARED) as core:
        other = submit(core, request(filler(model, 40, 1), 12, ignore_eos=True))
        wild = submit(core, request(filler(model, 40, 1), 12, ignore_eos=True, sampling=params))
        drain(core)
        assert other.timings.predicted_n == 12
        assert wild.error is None or isinstance(wild.error, GenerationFailed)
        assert np.isfinite(core.target.n_tokens(0))
