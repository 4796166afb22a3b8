"""The draft model: windows smaller than the text, states that were lost, memory that cannot be rewound."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from draft.draft_model import check_vocabulary
from draft.registry import DraftSetupError
from spec_server.runtime.model import Model
from tests.draft.setups import RECURRENT, Kind, drafting, prompts, repeating
from tests.engine.harness import (
    DRAFT,
    HYBRID,
    WINDOW,
    Prompt,
    filler,
    greedy,
    model_of,
    request,
    run,
    smollm2,
)

SELF = Kind(("draft-simple",), HYBRID, HYBRID)
FOREIGN = Kind(("draft-simple",), HYBRID, WINDOW, n_rs_seq=7)
BOTH = pytest.mark.parametrize("kind", [RECURRENT, FOREIGN], ids=["recurrent", "window"])


@pytest.mark.parametrize("n_slots", [1, 3])
def test_a_model_that_drafts_for_itself_is_nearly_always_right(n_slots: int) -> None:
    """Recurrent memory in front of every draft and behind every rejection; slots apart and together."""
    with drafting(SELF, n_slots=n_slots) as core:
        asked = [request(p, 64, id_slot=i) for i, p in enumerate(prompts(SELF, n_slots))]
        for turns in ([run(core, a)[0] for a in asked], run(core, *asked)):
            for t in turns:
                assert t.timings.draft_n_accepted >= 0.98 * t.timings.draft_n > 0
                assert t.timings.draft_prompt_n == 0


@BOTH
def test_each_draft_is_that_of_a_drafter_that_read_the_text_from_the_start(kind: Kind) -> None:
    prompt = prompts(kind, 2)[1]
    with drafting(kind) as core, drafting(kind) as fresh:
        (turn,) = run(core, request(prompt, 80, trace=True))
        text, same, trace, at = [*prompt.tokens, *turn.tokens], 0, turn.finished.trace, len(prompt)
        assert 0.2 < turn.timings.draft_n_accepted / turn.timings.draft_n < 0.95
        for step in trace:
            n = len(step["draft"])  # type: ignore[arg-type]
            (again,) = run(fresh, request(text[:at], n + 2, cache_prompt=False, trace=True))
            same += again.finished.trace[0]["draft"] == step["draft"]
            at += 1 + step["accepted"]  # type: ignore[operator]
        assert same >= 0.9 * len(trace)


@BOTH
@pytest.mark.parametrize("n_ctx_draft", [256, 512])
def test_a_window_smaller_than_the_text_goes_on_drafting(
    kind: Kind, n_ctx_draft: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(kind.path)
    long, short = filler(model, 200), prompts(kind, 1)[0]
    (plain,) = greedy(kind.path, [long], 200)
    with drafting(kind, n_ctx_draft=n_ctx_draft) as core:
        assert core.drafter.n_ctx_seq == n_ctx_draft < core.target.n_ctx_seq
        with caplog.at_level(logging.INFO):
            (turn,) = run(core, request(long, 200))
        assert turn.tokens == plain
        assert turn.timings.predicted_n == 200
        assert turn.timings.draft_n > 0
        assert turn.timings.draft_prompt_n == 0
        assert len([r for r in caplog.records if r.name.startswith("draft")]) <= 1
        (after,) = run(core, request(short, 24))
        assert after.timings.draft_n > 0


def test_a_draft_context_smaller_than_a_slot_is_told_once_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for n_ctx_draft, told in (
        (256, ["the draft context holds 256 tokens, a slot of the target 2048"]),
        (0, []),
    ):
        caplog.clear()
        with drafting(FOREIGN, n_slots=2, n_ctx_draft=n_ctx_draft):
            lines = [r.getMessage() for r in caplog.records if r.name == "draft.registry"]
        assert [line.partition(":")[0] for line in lines] == told


@pytest.mark.parametrize("seed", [1, 5])
def test_a_window_drafts_nearly_as_well_as_the_whole_text(seed: int) -> None:
    """Where the answer does not hark back to what is out of it. And it reads little: each token about twice."""
    talk = filler(model_of(HYBRID), 1500, seed)
    figures = {}
    for n_ctx_draft in (256, 2048):
        with drafting(FOREIGN, n_ctx_draft=n_ctx_draft) as core:
            context = core.drafter.inner._ctx  # type: ignore[attr-defined]
            (turn,) = run(core, request(talk, 200))
            figures[n_ctx_draft] = turn.timings.draft_n_accepted / turn.timings.draft_n
            assert turn.timings.n_drafts >= turn.timings.n_decodes - 2
            assert context.n_decodes < 8 * turn.timings.n_decodes
    assert figures[256] > figures[2048] - 0.1


@BOTH
@pytest.mark.parametrize("rebuild", [True, False])
def test_a_lost_state_is_read_again_in_chunks_and_counted(kind: Kind, rebuild: bool) -> None:
    kind = Kind(kind.types, kind.path, kind.draft, kind.n_rs_seq, {"rebuild": rebuild, "n_ubatch": 64})
    talk = filler(model_of(kind.path), 300)
    with drafting(kind) as core:
        (whole,) = run(core, request(talk, 24, trace=True))
        tokens = core.slots[0].tokens.view().tolist()
        (kept,) = run(core, request([*tokens, whole.tokens[-1]], 48))
    with drafting(kind) as core:
        run(core, request(talk, 24))
        core.drafter.truncate(0, 0)
        (turn,) = run(core, request([*tokens, whole.tokens[-1]], 48, trace=True))
        assert turn.tokens == kept.tokens
        assert turn.timings.cache_n == len(tokens)
        assert turn.timings.draft_n > 0
        assert (turn.timings.draft_prompt_n >= len(tokens)) == rebuild
        n_waiting = sum(not step["draft"] for step in turn.finished.trace)
        assert (n_waiting >= len(tokens) // 64 - 1) == rebuild  # one micro-batch a step, beside other work
        assert core.drafter.n_tokens(0) == len(core.slots[0].tokens)


@BOTH
def test_a_lost_state_comes_back_to_the_acceptance_that_it_had(kind: Kind) -> None:
    asked = prompts(kind, 6)
    counts = []
    for lost in (False, True):
        with drafting(kind) as core:
            drafted = accepted = 0
            for p in asked:
                core.rollback.clear(core.slots[0])
                (turn,) = run(core, request(Prompt(p.tokens), 24))
                text = [*core.slots[0].tokens.view().tolist(), turn.tokens[-1]]
                if lost:
                    core.drafter.truncate(0, 0)
                (turn,) = run(core, request(text, 48))
                drafted += turn.timings.draft_n
                accepted += turn.timings.draft_n_accepted
        counts.append(accepted / drafted)
    assert counts[1] == pytest.approx(counts[0], abs=0.03)


def test_a_rewound_prompt_rewinds_a_recurrent_draft_too() -> None:
    """The next turn keeps a part of the text only; what the draft cannot cut it reads again."""
    talk = filler(model_of(WINDOW), 40).tokens
    with drafting(RECURRENT) as core:
        run(core, request(talk, 24))
        (turn,) = run(core, request([*talk[:30], *repeating(RECURRENT).tokens], 24))
        assert core.drafter.n_tokens(0) == len(core.slots[0].tokens)
        assert turn.timings.draft_n > 0
    assert turn.tokens == greedy(WINDOW, [Prompt((*talk[:30], *repeating(RECURRENT).tokens))], 24)[0]


def test_p_min_ends_a_draft_before_the_first_token_below_it() -> None:
    for p_min, least in ((0.0, 0.0), (0.5, 0.55), (0.9, 0.75)):
        with drafting(FOREIGN, n_max=6) as core:
            sampling = [
                run(core, request(p, 64, speculative=_p_min(p_min)))[0].timings for p in prompts(FOREIGN, 4)
            ]
        rate = sum(t.draft_n_accepted for t in sampling) / sum(t.draft_n for t in sampling)
        assert rate >= least


def _p_min(p_min: float) -> object:
    from spec_server.engine.base import SpeculativeParams

    return SpeculativeParams(p_min=p_min)


@pytest.mark.parametrize("path", [HYBRID, WINDOW])
def test_another_vocabulary_is_refused_with_the_first_difference(path: object) -> None:
    target, draft = model_of(path), Model(DRAFT)  # type: ignore[arg-type]
    with (
        draft,
        pytest.raises(DraftSetupError, match=r"vocabulary does not fit the target's: .*target .*draft"),
    ):
        check_vocabulary(target, draft)


def test_permuted_pieces_are_refused_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with Model(DRAFT) as draft, Model(smollm2()) as target:
        check_vocabulary(target, draft)
        texts = list(draft._texts)
        texts[77], texts[78] = texts[78], texts[77]
        monkeypatch.setitem(draft.__dict__, "_texts", texts)
        with pytest.raises(DraftSetupError, match="token 77"):
            check_vocabulary(target, draft)


@pytest.mark.parametrize("kind", [SELF, FOREIGN], ids=["self", "window"])
def test_a_quantised_cache_costs_a_few_points_at_most(kind: Kind) -> None:
    rates = []
    for cache in ("f16", "q8_0"):
        quantised = Kind(kind.types, kind.path, kind.draft, options={"type_k": cache, "type_v": cache})
        with drafting(quantised) as core:
            timings = [run(core, request(p, 48))[0].timings for p in prompts(kind, 4)]
        rates.append(np.sum([t.draft_n_accepted for t in timings]) / np.sum([t.draft_n for t in timings]))
    assert rates[1] >= rates[0] - 0.05
