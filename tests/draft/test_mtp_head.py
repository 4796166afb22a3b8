"""The MTP head: as good as where it was trained, its hidden rows are the right ones, and its state matters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from draft.base import DraftState
from draft.mtp_head import MtpHeadDrafter
from draft.registry import DrafterSetup, DraftSetupError, make_drafter
from spec_server.engine.core import EngineCore
from spec_server.runtime.llama_context import LlamaContext
from tests.draft.setups import MTP, Kind, drafting, drafts_of, prompts, room
from tests.engine.harness import DRAFT, HYBRID, WINDOW, Prompt, Turn, filler, model_of, request, run

# As it was measured when it was trained: every draft whole, since the target takes each back by itself.
TRAINED = Kind(("draft-mtp",), n_rs_seq=5)
ROW = 4 * 256  # bytes of the tiny model's hidden row, the end of the speculative state


def head_of(core: EngineCore) -> MtpHeadDrafter:
    head = core.drafter.inner  # type: ignore[attr-defined]
    assert isinstance(head, MtpHeadDrafter)
    return head


def acceptance(turns: Sequence[Turn]) -> float:
    return sum(t.timings.draft_n_accepted for t in turns) / sum(t.timings.draft_n for t in turns)


def answers(core: EngineCore, asked: Sequence[Prompt], n: int = 96) -> list[Turn]:
    """As the model was measured when it was trained: up to n tokens or the end token, each from an empty slot."""
    turns = []
    for prompt in asked:
        core.rollback.clear(core.slots[0])
        turns.append(run(core, request(Prompt(prompt.tokens), n, ignore_eos=False))[0])
    return turns


def rounds(core: EngineCore, prompt: Sequence[int], n: int, k: int) -> tuple[int, int]:
    """(drafted, accepted) without limits of the engine's: whole rounds until n tokens or an end token."""
    core.rollback.clear(core.slots[0])
    (turn,) = run(core, request(prompt, n + k + 1, ignore_eos=True, trace=True))
    drafted = accepted = at = 0
    for step in turn.finished.trace:
        new = turn.tokens[1 + at : 1 + at + step["accepted"] + 1]  # type: ignore[operator]
        drafted += len(step["draft"])  # type: ignore[arg-type]
        accepted += step["accepted"]  # type: ignore[operator]
        at += len(new)
        if at >= n or set(new) & core.model.eog:
            break
    return drafted, accepted


# -- as good as where it was trained


@pytest.mark.parametrize(("k", "least"), [(2, 0.8), (4, 0.68)])
def test_acceptance_on_a_few_prompts(k: int, least: float) -> None:
    with drafting(TRAINED, n_max=k) as core:
        drafted, accepted = np.sum([rounds(core, p.tokens, 96, k) for p in prompts(MTP, 8)], axis=0)
        assert accepted / drafted >= least


@pytest.mark.slow
@pytest.mark.parametrize(("k", "trained"), [(2, 0.853), (4, 0.741)])
def test_acceptance_is_that_of_the_recipe(k: int, trained: float) -> None:
    with drafting(TRAINED, n_max=k) as core:
        drafted, accepted = np.sum([rounds(core, p.tokens, 96, k) for p in prompts(MTP, 100)], axis=0)
        assert round(accepted / drafted, 3) >= trained


@pytest.mark.parametrize("n_ubatch", [32, 48, 512])
def test_chunks_of_the_prompt_do_not_change_what_it_is_worth(n_ubatch: int) -> None:
    """A prompt of half a micro-batch and one of several: the row that a chunk leaves is the next one's first."""
    asked = [Prompt(filler(model_of(HYBRID), n, seed).tokens) for seed in range(4) for n in (24, 72)]
    with drafting(MTP) as core:
        whole = answers(core, asked, 64)
    with drafting(MTP, n_ubatch=n_ubatch) as core:
        chunked = answers(core, asked, 64)
    assert [t.tokens for t in chunked] == [t.tokens for t in whole]
    assert acceptance(chunked) == pytest.approx(acceptance(whole), abs=0.03)


def test_later_positions_are_drafted_from_rows_of_their_own() -> None:
    """A row that the next decode had overwritten would show at the second position."""
    with drafting(MTP, n_max=2) as core:
        turns = answers(core, prompts(MTP, 8), 64)
    n_drafts = sum(t.timings.n_drafts for t in turns)
    first, second = np.sum([t.timings.accepted_per_pos for t in turns], axis=0)
    assert second / first >= 0.8 * first / n_drafts


# -- it stands behind what was accepted


@pytest.mark.parametrize("n_rs_seq", [0, 4])
def test_each_draft_is_that_of_a_head_that_read_the_text_from_the_start(n_rs_seq: int) -> None:
    prompt = prompts(MTP, 2)[1]
    with drafting(MTP, n_rs_seq=n_rs_seq) as core, drafting(MTP) as fresh:
        (turn,) = run(core, request(prompt, 80, trace=True))
        text, same, trace = [*prompt.tokens, *turn.tokens], 0, turn.finished.trace
        assert 0 < sum(s["accepted"] < len(s["draft"]) for s in trace) < len(trace)  # type: ignore[arg-type,misc]
        at = len(prompt)
        for step in trace:
            (again,) = run(fresh, request(text[:at], len(step["draft"]) + 2, cache_prompt=False, trace=True))  # type: ignore[arg-type]
            same += again.finished.trace[0]["draft"] == step["draft"]
            at += 1 + step["accepted"]  # type: ignore[operator]
        # Batches of other sizes round hidden rows differently, so that a near tie may part.
        assert same >= 0.95 * len(trace)


def test_what_waits_is_a_copy() -> None:
    with drafting(MTP) as core:
        run(core, request(prompts(MTP, 1)[0], 8))
        head = head_of(core)
        kept = head._heads[0].row.copy()
        view = core.target.hidden(0, 1)
        assert not np.shares_memory(head._heads[0].row, view)
        run(
            core,
            request(filler(core.model, 40), 4, id_slot=0),
            request(filler(core.model, 40, 1), 4, id_slot=0),
        )
        assert not np.array_equal(head._heads[0].row, kept)


# -- its state matters


def follow_up(core: EngineCore, asked: Sequence[Prompt], *, keep: bool) -> float:
    """Acceptance of the first drafts after a state was taken out, and put back in or not."""
    accepted = drafted = 0
    head = core.drafter
    for prompt in asked:
        core.rollback.clear(core.slots[0])
        (turn,) = run(core, request(Prompt(prompt.tokens), 24))
        tokens = core.slots[0].tokens.view().copy()
        state = head.capture(0, room(head.state_size(0, partial=False)), partial=False)
        context, spec = bytes(state.context), bytes(state.spec)
        head.truncate(0, 0)
        if keep:
            head.apply(0, DraftState(context, spec), tokens, partial=False)
        (turn,) = run(core, request([*tokens.tolist(), turn.tokens[-1]], 8))
        drafted += turn.timings.draft_n
        accepted += turn.timings.draft_n_accepted
    return accepted / drafted


def test_a_lost_state_costs_acceptance() -> None:
    with drafting(MTP, n_max=4) as core:
        asked = prompts(MTP, 12)
        kept, lost = (follow_up(core, asked, keep=keep) for keep in (True, False))
    assert lost < kept - 0.2


def test_the_row_decides_the_first_draft() -> None:
    with drafting(MTP, n_max=4) as core:
        head, changed = head_of(core), 0
        for prompt in prompts(MTP, 16):
            core.rollback.clear(core.slots[0])
            (turn,) = run(core, request(Prompt(prompt.tokens), 24))
            expected = drafts_of(core, 0, turn.tokens[-1])
            head._heads[0].row[:] = 0.0
            changed += drafts_of(core, 0, turn.tokens[-1]) != expected
        assert changed >= 8


@pytest.mark.parametrize("size", [0, 11, 12, 12 + ROW - 4, 12 + ROW + 4])
def test_a_state_of_another_size_is_named(size: int) -> None:
    with drafting(MTP) as core:
        run(core, request(prompts(MTP, 1)[0], 8))
        head, n = head_of(core), len(core.slots[0].tokens)
        assert "size" in (head.unfit(head.fit(0), n, 0, size) or "")
        assert head.unfit(head.fit(0), n, 0, 12 + ROW) is None
        assert "position" in (head.unfit(head.fit(0), n + 1, 0, 12 + ROW) or "")
        assert "position" in (head.unfit(head.fit(0), n - 1, 0, 12 + ROW) or "")


def test_a_head_that_lost_its_state_says_that_it_cannot_rebuild() -> None:
    with drafting(MTP) as core:
        (turn,) = run(core, request(prompts(MTP, 1)[0], 16))
        assert "hidden rows" in core.drafter.cannot_rebuild
        core.drafter.truncate(0, 0)
        text = [*core.slots[0].tokens.view().tolist(), turn.tokens[-1]]
        (turn,) = run(core, request(text, 24))
        assert turn.timings.cache_n == len(text) - 1
        assert turn.timings.draft_n_accepted > 0  # it drafts with what it has
        assert turn.timings.draft_prompt_n == 0


# -- limits


@pytest.mark.parametrize("n_ctx_draft", [16, 64, 256])
def test_a_small_context_starts_anew_and_goes_on_drafting(n_ctx_draft: int) -> None:
    prompt = prompts(MTP, 1)[0]
    with drafting(MTP) as core:
        (whole,) = run(core, request(prompt, 400))
    with drafting(MTP, n_ctx_draft=n_ctx_draft) as core:
        (turn,) = run(core, request(prompt, 400))
        assert core.drafter.n_ctx_seq >= n_ctx_draft
    assert turn.tokens == whole.tokens
    assert turn.timings.n_drafts >= whole.timings.n_drafts
    assert turn.timings.draft_n_accepted >= 0.5 * turn.timings.draft_n


def setup_error(path: object, types: Sequence[str] = ("draft-mtp",), **fields: object) -> str:
    model = model_of(path, True)  # type: ignore[arg-type]
    target = LlamaContext(model, n_ctx=256, expose_hidden=model.has_mtp)
    try:
        with pytest.raises(DraftSetupError) as raised:
            make_drafter(types, DrafterSetup(model, target, 2, n_ctx=256, **fields))  # type: ignore[arg-type]
    finally:
        target.close()
    return str(raised.value)


def test_what_cannot_be_served_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tiny-gemma3-swa.gguf has no MTP head" in setup_error(WINDOW)
    assert "--model-draft" in setup_error(HYBRID, model_path=DRAFT)
    monkeypatch.setitem(model_of(HYBRID, True).__dict__, "n_nextn", 3)
    assert "3 MTP layers" in setup_error(HYBRID)
    monkeypatch.setitem(model_of(HYBRID, True).__dict__, "n_nextn", 1)
    monkeypatch.setitem(model_of(HYBRID, True).__dict__, "arch", "gemma4-assistant")
    assert "shares the target's memory" in setup_error(HYBRID)
