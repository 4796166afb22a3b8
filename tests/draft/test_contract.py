"""What every drafter promises, on real models: the text of the run without it, limits kept, states that carry on."""

from __future__ import annotations

import orjson
import pytest

from draft.base import DraftState, DraftStateError
from draft.none import NoDrafter
from spec_server.engine.base import SpeculativeParams
from spec_server.engine.core import EngineCore
from tests.draft.setups import ALL, N_MAX, Kind, drafting, drafts_of, prompts, repeating, room, setup
from tests.engine.harness import HYBRID, chat_prompts, core_of, greedy, request, run, together

pytestmark = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.id)


def captured(core: EngineCore, seq_id: int = 0, *, partial: bool = False) -> DraftState:
    """A copy, as a file would give it."""
    drafter = core.drafter
    state = drafter.capture(seq_id, room(drafter.state_size(seq_id, partial=partial)), partial=partial)
    return DraftState(bytes(state.context), bytes(state.spec))


def started(core: EngineCore, kind: Kind, id_slot: int = 0, n: int = 24) -> int:
    """A conversation in the slot that is saying the same again; the token that its next draft stands behind."""
    text = repeating(kind)
    run(core, request(text, n, id_slot=id_slot))
    tokens = core.slots[id_slot].tokens.view().tolist()
    run(core, request([*tokens, *text.tokens, *text.tokens[:6]], 0, id_slot=id_slot))
    return text.tokens[6]


def test_greedy_text_is_that_of_no_drafter(kind: Kind) -> None:
    asked = [*prompts(kind, 3), repeating(kind)]
    plain = greedy(kind.path, asked, 40)
    with drafting(kind) as core:
        turns = [run(core, request(p, 40))[0] for p in asked]
        assert [t.tokens for t in turns] == plain
        assert sum(t.timings.draft_n_accepted for t in turns) > 0
        for t in turns:
            assert sum(t.timings.accepted_per_pos) == t.timings.draft_n_accepted
            assert t.timings.draft_n == sum(d["drafted"] for d in t.timings.drafters.values())
            assert set(t.timings.drafters) <= set(kind.types)


def test_slots_side_by_side_draft_as_each_would_alone(kind: Kind) -> None:
    """Each slot's drafts come of its own text, batched with others' or not."""
    if kind.path != HYBRID:
        pytest.skip("this target's own text parts at a near tie when it has neighbours")
    asked = [*prompts(kind, 3), repeating(kind)]
    with drafting(kind) as core:
        alone = []
        for p in asked:
            core.rollback.clear(core.slots[0])
            alone.append(run(core, request(p, 24))[0])
    plain = together(setup(kind, n_slots=4), asked, 24)
    with drafting(kind, n_slots=4) as core:
        turns = run(core, *[request(p, 24, id_slot=i) for i, p in enumerate(asked)])
    same = [(turn, one) for turn, one in zip(turns, alone, strict=True) if turn.tokens == one.tokens]
    assert len(same) >= len(asked) - 1
    assert all(t.tokens in (one.tokens, p) for t, one, p in zip(turns, alone, plain, strict=True))
    accepted = [(turn.timings.draft_n_accepted, one.timings.draft_n_accepted) for turn, one in same]
    assert sum(abs(a - b) for a, b in accepted) <= 4


def test_it_stands_where_the_target_stands(kind: Kind) -> None:
    with drafting(kind) as core:
        started(core, kind)
        assert core.drafter.n_tokens(0) == len(core.slots[0].tokens) == core.target.n_tokens(0)
        core.rollback.clear(core.slots[0])
        assert core.drafter.n_tokens(0) == 0


@pytest.mark.parametrize("n_max", [0, 1, 2, 7])
def test_a_draft_is_never_longer_than_asked(kind: Kind, n_max: int) -> None:
    with drafting(kind, n_max=7) as core:
        last = started(core, kind)
        assert len(drafts_of(core, 0, last, n_max=n_max).tokens) <= n_max


def test_limits_of_probability_and_length_hold(kind: Kind) -> None:
    with drafting(kind) as core:
        last = started(core, kind)
        assert drafts_of(core, 0, last).tokens
        assert drafts_of(core, 0, last, p_min=1.1).tokens == []
        assert drafts_of(core, 0, last, n_min=N_MAX + 100).tokens == []
        assert len(drafts_of(core, 0, last, n_max=2, n_min=2).tokens) in (0, 2)


def test_proposing_twice_gives_the_same_draft(kind: Kind) -> None:
    with drafting(kind) as core:
        last = started(core, kind)
        assert drafts_of(core, 0, last) == drafts_of(core, 0, last)


def test_an_end_token_is_the_last_of_its_draft(kind: Kind) -> None:
    with drafting(kind) as core:
        end = core.model.tokenize("<|im_end|>", False, True)
        talk = [*core.model.tokenize("Yes, of course it is.", False, False), *end]
        (turn,) = run(core, request(talk * 6, 4))
        for cut in range(1, len(talk)):
            (turn,) = run(core, request(talk * 6 + talk[:cut], 4, trace=True))
            for step in turn.finished.trace:
                assert not set(step["draft"][:-1]) & core.model.eog  # type: ignore[index]


@pytest.mark.parametrize("to_slot", [0, 1])
def test_a_state_drafts_in_any_slot_of_any_process_as_the_live_one(kind: Kind, to_slot: int) -> None:
    with drafting(kind, n_slots=2) as core:
        last = started(core, kind)
        tokens = core.slots[0].tokens.view().copy()
        fit, state = core.drafter.fit(0), captured(core)
        expected = drafts_of(core, 0, last)
        core.drafter.begin(0, tokens)
        assert drafts_of(core, 0, last) == expected
    with drafting(kind, n_slots=2) as core:
        if to_slot:  # something else was there before
            run(core, request(prompts(kind, 1)[0], 8, id_slot=to_slot))
        core.drafter.truncate(to_slot, 0)
        core.slots[to_slot].tokens.truncate(0)
        core.slots[to_slot].tokens.extend(tokens)
        assert core.drafter.unfit(fit, len(tokens), len(state.context), len(state.spec)) is None
        assert core.drafter.apply(to_slot, state, tokens, partial=False) == ""
        assert drafts_of(core, to_slot, last) == expected
        assert core.drafter.n_tokens(to_slot) == len(tokens)


def test_no_drafter_and_damaged_headers_are_refused_with_a_reason(kind: Kind) -> None:
    with drafting(kind) as core:
        started(core, kind)
        fit, state, n = core.drafter.fit(0), captured(core), len(core.slots[0].tokens)
        sizes = len(state.context), len(state.spec)
        header = orjson.loads(fit)
        for bad in (
            b"",
            b"[]",
            b"{",
            b"null",
            orjson.dumps(header | {"version": 2}),
            orjson.dumps({"version": 1}),
        ):
            assert core.drafter.unfit(bad, n, *sizes)
        assert core.drafter.unfit(orjson.dumps(header | {"kind": "other"}), n, *sizes)
        assert NoDrafter().unfit(fit, n, *sizes)


def test_a_cut_off_speculative_state_is_named_or_does_no_harm(kind: Kind) -> None:
    with drafting(kind) as core:
        last = started(core, kind)
        state, tokens = captured(core), core.slots[0].tokens.view().copy()
        expected = drafts_of(core, 0, last)
        for n in range(1, len(state.spec), max(1, len(state.spec) // 40)):
            core.drafter.truncate(0, 0)
            try:
                left_out = core.drafter.apply(
                    0, DraftState(state.context, state.spec[:n]), tokens, partial=False
                )
            except DraftStateError as e:
                left_out = str(e)
            assert left_out or drafts_of(core, 0, last) == expected
        core.drafter.begin(0, tokens)
        drafts_of(core, 0, last)
        assert run(core, request(repeating(kind), 8))[0].timings.predicted_n == 8


def test_a_part_way_state_comes_back_as_it_was(kind: Kind) -> None:
    """What a checkpoint holds: the drafter goes on from there as it did the first time."""
    with drafting(kind) as core:
        last = started(core, kind)
        state, tokens = captured(core, partial=True), core.slots[0].tokens.view().copy()
        expected = drafts_of(core, 0, last)
        run(core, request([*tokens.tolist(), last], 12))
        core.drafter.apply(0, state, tokens, partial=True)
        core.slots[0].tokens.truncate(len(tokens))
        assert drafts_of(core, 0, last) == expected


@pytest.mark.parametrize("off", [SpeculativeParams(n_max=0), SpeculativeParams(type="none")])
def test_a_turn_without_drafts_keeps_the_next_turns_acceptance(kind: Kind, off: SpeculativeParams) -> None:
    first = prompts(kind, 1)[0]
    with drafting(kind) as core:
        turns = []
        for how in (SpeculativeParams(), off):
            core.rollback.clear(core.slots[0])
            (one,) = run(core, request(first, 24, speculative=how))
            more = core.model.tokenize("<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n", False, True)
            (two,) = run(core, request([*first.tokens, *one.tokens, *more], 24))
            turns.append((one, two))
        (_, with_drafts), (without, after) = turns
        assert without.timings.draft_n == 0
        assert after.tokens == with_drafts.tokens
        assert after.timings.draft_n > 0 or with_drafts.timings.draft_n == 0
        assert abs(after.timings.draft_n_accepted - with_drafts.timings.draft_n_accepted) <= 2
        assert after.timings.draft_prompt_n == 0


@pytest.mark.parametrize("n_prompt", [50, 57, 62, 63])
def test_drafts_end_where_the_context_ends(kind: Kind, n_prompt: int) -> None:
    with drafting(kind, n_max=16, n_ctx=256) as core:
        n_ctx = core.target.n_ctx_seq
        tokens = (repeating(kind, 20).tokens * 2)[: n_ctx - 64 + n_prompt]
        (turn,) = run(core, request(tokens, -1))
        assert turn.timings.predicted_n == n_ctx - len(tokens) + 1
        assert turn.finished.reason == "length"
        assert run(core, request(chat_tokens(core), 8))[0].timings.predicted_n == 8


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_max_tokens_inside_a_draft(kind: Kind, n: int) -> None:
    with drafting(kind, n_max=16) as core:
        (turn,) = run(core, request(repeating(kind), n))
        assert len(turn.tokens) == turn.timings.predicted_n == n
        assert len(core.slots[0].tokens) == len(repeating(kind)) + n - 1


def test_a_stop_string_inside_a_draft(kind: Kind) -> None:
    with drafting(kind) as core:
        (whole,) = run(core, request(repeating(kind), 40))
        for start in range(8, 40, 4):
            word = whole.text[start : start + 9]
            (turn,) = run(core, request(repeating(kind), 40, stop=(word,)))
            assert turn.finished.stopping_word == word
            assert turn.text == whole.text[: whole.text.index(word)]
            assert core.drafter.n_tokens(0) == len(core.slots[0].tokens) == core.target.n_tokens(0)
            assert len(core.slots[0].tokens) == len(repeating(kind)) + turn.timings.predicted_n - 1


def test_counts_add_up(kind: Kind) -> None:
    with core_of(setup(kind)) as core:
        (turn,) = run(core, request(prompts(kind, 1)[0], 64, trace=True))
        t, trace = turn.timings, turn.finished.trace
        assert t.predicted_n == t.draft_n_accepted + t.n_decodes + 1  # the first token comes from the prompt
        assert sum(len(step["draft"]) for step in trace) == t.draft_n  # type: ignore[arg-type]
        assert sum(step["accepted"] for step in trace) == t.draft_n_accepted  # type: ignore[misc]
        assert list(t.accepted_per_pos) == sorted(t.accepted_per_pos, reverse=True)


def chat_tokens(core: EngineCore) -> list[int]:
    return core.model.tokenize(chat_prompts(1)[0][0]["content"], False, True)[:32]
