"""One KV buffer for all slots: more requests than it holds at once are served one after the other, whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from eval.models import DRAFTER
from spec_server.engine.base import SamplingParams
from spec_server.engine.errors import ContextExceeded, GenerationFailed
from spec_server.runtime.batch import Batch
from tests.engine.harness import Setup, core_of, drain, filler, model_of, request, run, serve, submit

SHARED = Setup(DRAFTER, n_slots=4, n_ctx=64, kv_unified=True, n_ubatch=32)  # 256 cells for all


def test_prompts_that_do_not_fit_at_once_wait_and_no_answer_is_cut() -> None:
    prompts = [filler(model_of(DRAFTER), 150, seed) for seed in range(4)]
    with core_of(SHARED) as core:
        turns = [submit(core, request(p, 6, ignore_eos=True)) for p in prompts]
        drain(core)
        assert [t.error for t in turns] == [None] * 4
        assert [(t.timings.predicted_n, t.finished.truncated) for t in turns] == [(6, False)] * 4
        assert core.stats.events["requests_postponed_for_room_total"] > 0


def test_a_prompt_whose_cells_are_held_by_one_outside_the_batch_waits() -> None:
    """The newer prompt alone fills the micro-batch; refused, it would be too long for a server that it fits."""
    first, second = (filler(model_of(DRAFTER), 200, seed) for seed in (1, 2))
    with core_of(SHARED) as core:
        turns = [submit(core, request(first, 4, id_slot=1, ignore_eos=True))]
        for _ in range(5):
            core.step()
        turns.append(submit(core, request(second, 4, id_slot=0, ignore_eos=True)))
        core.step()
        drain(core)
        assert [t.error for t in turns] == [None, None]
        assert [t.timings.predicted_n for t in turns] == [4, 4]
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


def test_a_prompt_waits_for_the_cells_of_a_slot_that_is_being_saved() -> None:
    """They are free as soon as it is idle again; refused, the prompt would be too long for a server it fits."""
    model = model_of(DRAFTER)
    with core_of(SHARED) as core:
        run(core, request(filler(model, 150, 1), 4, id_slot=0))
        core.reserve(0, lambda: None)
        turn = submit(core, request(filler(model, 200, 2), 4, id_slot=1, ignore_eos=True))
        for _ in range(20):
            core.step()
        assert (turn.error, turn.events, len(core.slots[0].tokens)) == (None, [], 153)
        assert core.finisher.awaits_transfer
        core.unreserve(0)
        drain(core)
        assert turn.timings.predicted_n == 4
        assert core.stats.events["slots_emptied_for_room_total"] == 1


def test_an_answer_waits_for_the_cells_of_a_slot_that_is_being_saved() -> None:
    model = model_of(DRAFTER)
    with core_of(SHARED) as core:
        run(core, request(filler(model, 150, 1), 4, id_slot=0))
        core.reserve(0, lambda: None)
        turn = submit(core, request(filler(model, 60, 2), 80, id_slot=1, ignore_eos=True))
        for _ in range(100):
            core.step()
        assert core.slots[1].task is not None, "ended early"
        core.unreserve(0)
        drain(core)
        assert (turn.timings.predicted_n, turn.finished.truncated) == (80, False)


def test_an_empty_slot_that_is_being_erased_is_not_waited_for() -> None:
    model = model_of(DRAFTER)
    with core_of(SHARED) as core:
        core.reserve(0, lambda: None)
        turns = [submit(core, request(filler(model, 90, i), 400, id_slot=i, ignore_eos=True)) for i in (1, 2)]
        drain(core, 1000)
        assert [t.finished.truncated for t in turns] == [True, True]
        assert not core.finisher.awaits_transfer


def test_saves_without_end_refuse_nobody(tmp_path: Path) -> None:
    """And the engine thread sleeps while it has to wait: a step in vain would keep the save from its end."""
    model = model_of(DRAFTER)

    async def scenario() -> tuple[int, int]:
        n_served = n_steps = 0
        async with serve(SHARED, tmp_path) as server:
            decode = server.core.target.decode

            def counted(batch: Batch) -> None:
                nonlocal n_steps
                n_steps += 1
                decode(batch)

            server.core.target.decode = counted  # type: ignore[method-assign]
            for seed in range(8):
                await server.ask(request(filler(model, 150, 1), 4, id_slot=0))
                saves = [asyncio.create_task(server.save(0, f"{i}.bin")) for i in range(3)]
                await asyncio.sleep(0)
                turn = await server.ask(request(filler(model, 200, 2 + seed), 4, id_slot=1))
                n_served += turn.timings.predicted_n == 4
                await asyncio.gather(*saves)
                await server.erase(1)
        return n_served, n_steps

    n_served, n_steps = asyncio.run(scenario())
    assert n_served == 8
    assert n_steps < 8 * 60
