"""A draft model that reads what it lacks with its next draft: fewer steps, the same drafts, nothing lost by it."""

from __future__ import annotations

import pytest

from draft.base import DraftRequest
from draft.draft_model import DraftModelDrafter
from spec_server.engine.base import SpeculativeParams
from spec_server.engine.core import EngineCore
from tests.draft.setups import FULL, FULL_CHAIN, RECURRENT, Kind, drafting, prompts, repeating
from tests.engine.harness import WINDOW, filler, model_of, request, run

LATE = 16  # tokens that may wait for the next draft


def model_drafter(core: EngineCore) -> DraftModelDrafter:
    inner = core.drafter.inner  # type: ignore[attr-defined]
    found: DraftModelDrafter = next(
        m for m in getattr(inner, "members", [inner]) if isinstance(m, DraftModelDrafter)
    )
    return found


def eager(core: EngineCore) -> None:
    drafter = model_drafter(core)
    drafter._reads_late, drafter._most_late = False, 0


def test_each_drafted_token_costs_one_step_and_nothing_else_does() -> None:
    with drafting(FULL, n_max=4) as core:
        prompt = prompts(FULL, 1)[0]
        run(core, request(prompt, 1))
        context = model_drafter(core)._ctx
        before = context.n_decodes  # type: ignore[attr-defined]
        (turn,) = run(core, request(prompt, 64))
        steps = context.n_decodes - before  # type: ignore[attr-defined]
    assert turn.timings.draft_n_accepted > 10
    assert steps - turn.timings.draft_n in (0, 1)  # the prompt's last token, which is read again


@pytest.mark.parametrize("n_slots", [1, 3])
def test_drafts_are_those_of_one_that_reads_at_once(n_slots: int) -> None:
    drafts: list[list[object]] = []
    for at_once in (False, True):
        with drafting(FULL, n_max=4, n_slots=n_slots) as core:
            if at_once:
                eager(core)
            turns = run(core, *[request(p, 48, trace=True) for p in prompts(FULL, n_slots)])
            drafts.append([step["draft"] for turn in turns for step in turn.finished.trace])
    same = sum(a == b for a, b in zip(*drafts, strict=False))
    assert same >= 0.9 * len(drafts[1])  # another batch rounds differently, so one may part


def test_between_requests_it_lags_by_little_and_reads_the_next_prompt_as_it_comes() -> None:
    small_steps = Kind(FULL.types, FULL.path, FULL.draft, options={"n_ubatch": 32})
    with drafting(small_steps, n_max=4) as core:
        drafter = model_drafter(core)
        for _ in range(4):
            text = [*core.slots[0].tokens.view().tolist(), *filler(model_of(FULL.path), 100).tokens]
            (turn,) = run(core, request(text, 24, trace=True))
            assert 0 <= len(core.slots[0].tokens) - drafter.n_tokens(0) <= LATE
            assert turn.timings.draft_prompt_n == 0
            assert turn.finished.trace[0]["draft"]


def test_settled_it_holds_the_whole_text_and_the_next_draft_is_the_same() -> None:
    drafts = []
    for settles in (False, True):
        with drafting(FULL, n_max=4) as core:
            (turn,) = run(core, request(prompts(FULL, 1)[0], 24))
            tokens, drafter = core.slots[0].tokens.view().copy(), model_drafter(core)
            if settles:
                assert drafter.n_tokens(0) < len(tokens)
                core.drafter.settle(0, tokens)
                assert drafter.n_tokens(0) == len(tokens)
                core.drafter.settle(0, tokens)
                assert drafter.n_tokens(0) == len(tokens)
            [draft] = drafter.propose([DraftRequest(0, tokens, turn.tokens[-1], 4)])
            drafts.append(draft.tokens)
    assert drafts[0] == drafts[1] != []


def test_a_lag_is_no_lost_state_and_a_lost_state_is_no_lag() -> None:
    with drafting(FULL, n_max=4) as core:
        run(core, request(prompts(FULL, 1)[0], 24))
        text = core.slots[0].tokens.view().tolist()
        core.drafter.truncate(0, 0)
        (turn,) = run(core, request([*text, 198], 24))
    assert turn.timings.draft_prompt_n >= len(text)


def test_a_window_that_moves_is_no_lost_state() -> None:
    with drafting(FULL, n_max=4, n_ctx_draft=256) as core:
        text = list(prompts(FULL, 1)[0].tokens)
        for _ in range(4):
            (turn,) = run(core, request(text, 120))
            assert turn.timings.draft_n > 0
            assert turn.timings.draft_prompt_n == 0
            text += turn.tokens
        assert len(text) > 2 * 256


@pytest.mark.parametrize(
    "kind", [Kind(("draft-simple",), WINDOW, WINDOW), RECURRENT], ids=lambda kind: kind.id
)
@pytest.mark.parametrize(("n_prompt", "n_max"), [(200, 0), (250, None), (300, None)])
def test_what_no_window_has_room_for_is_no_lost_state_either(
    kind: Kind, n_prompt: int, n_max: int | None
) -> None:
    """A prompt that is longer, or a text that outgrew it while nothing was drafted."""
    with drafting(kind, n_max=4, n_ctx_draft=256, n_ctx=1024) as core:
        text = list(filler(core.model, n_prompt).tokens)
        (turn,) = run(core, request(text, 80, speculative=SpeculativeParams(n_max=n_max)))
        (after,) = run(core, request([*text, *turn.tokens, 300], 40))
    assert after.timings.draft_n > 0
    assert (turn.timings.draft_prompt_n, after.timings.draft_prompt_n) == (0, 0)


def test_beside_drafts_from_text_the_model_reads_nothing() -> None:
    """Until it has to draft itself."""
    with drafting(FULL_CHAIN) as core:
        prompt = repeating(FULL_CHAIN, 6)
        run(core, request(prompt, 1))
        drafter = model_drafter(core)
        before = drafter._ctx.n_decodes  # type: ignore[attr-defined]
        (turn,) = run(core, request(prompt, 64))
        own = turn.timings.n_decodes - turn.timings.n_drafts
        steps = drafter._ctx.n_decodes - before  # type: ignore[attr-defined]
    assert turn.timings.draft_n_accepted > 40
    assert steps <= own + 2


@pytest.mark.parametrize(
    "kind", [RECURRENT, Kind(FULL.types, FULL.path, FULL.draft, options={"rebuild": False})]
)
def test_where_that_would_lose_something_it_reads_at_once(kind: Kind) -> None:
    """Memory that cannot go back stands where checkpoints are; without rebuild what is missing stays missing."""
    with drafting(kind) as core:
        run(core, request(prompts(kind, 1)[0], 24))
        assert core.drafter.n_tokens(0) == len(core.slots[0].tokens)
