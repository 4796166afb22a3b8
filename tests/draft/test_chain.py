"""Chains: who is asked, what is counted apart, and members that are judged and dropped alone."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.base import DraftState, DraftStateError
from draft.chain import ChainDrafter, _pack, _Stored, _unpack
from draft.registry import DrafterSetup, DraftSetupError, make_drafter
from spec_server.engine.base import SpeculativeParams
from spec_server.engine.core import EngineCore
from spec_server.runtime.llama_context import LlamaContext
from tests.draft.setups import CHAIN, MOD, MTP, SIMPLE, Kind, drafting, drafts_of, prompts, repeating, room
from tests.engine.harness import HYBRID, model_of, request, run

THREE = Kind(("ngram-mod", "ngram-simple", "draft-mtp"))


def chain_of(core: EngineCore) -> ChainDrafter:
    chain = core.drafter.inner  # type: ignore[attr-defined]
    assert isinstance(chain, ChainDrafter)
    return chain


def captured(chain: ChainDrafter, *, partial: bool = False) -> DraftState:
    state = chain.capture(0, room(chain.state_size(0, partial=partial)), partial=partial)
    return DraftState(bytes(state.context), bytes(state.spec))


def test_the_first_draft_is_taken_and_each_is_counted_apart() -> None:
    with drafting(THREE) as core:
        turns = [run(core, request(p, 200))[0] for p in (*prompts(THREE, 3), repeating(THREE))]
        seen = {name for t in turns for name in t.timings.drafters}
        assert seen == set(THREE.types)
        for t in turns:
            parts = t.timings.drafters.values()
            assert sum(d["drafts"] for d in parts) == t.timings.n_drafts
            assert sum(d["drafted"] for d in parts) == t.timings.draft_n
            assert all(sum(d["accepted_per_pos"]) == d["accepted"] for d in parts)
            assert all(d["mean_length"] == 1 + d["accepted"] / d["drafts"] for d in parts)
            assert 0 < sum(d["draft_ms"] for d in parts) <= t.timings.draft_ms + 1e-6
            assert sum(d["accepted"] for d in parts) == t.timings.draft_n_accepted
            assert sum(t.timings.accepted_per_pos) == t.timings.draft_n_accepted
        counted = {k: v for k, v in core.stats.events.items() if k.startswith("spec_drafter_accepted_total")}
        assert set(counted) == {f'spec_drafter_accepted_total{{drafter="{name}"}}' for name in THREE.types}
        assert sum(counted.values()) == core.stats.n_accepted


def test_order_is_the_order_of_trial() -> None:
    for types, first in (
        (("ngram-simple", "draft-mtp"), "ngram-simple"),
        (("draft-mtp", "ngram-simple"), "draft-mtp"),
    ):
        kind = Kind(types)
        with drafting(kind) as core:
            text = repeating(kind)
            run(core, request([*text.tokens, *text.tokens[:6]], 0))
            assert drafts_of(core, 0, text.tokens[6]).drafter == first
            core.rollback.clear(core.slots[0])
            run(core, request(prompts(kind, 1)[0], 0))
            assert drafts_of(core, 0, 5).drafter == "draft-mtp"  # nothing repeats


def test_a_member_stands_behind_what_another_one_drafted() -> None:
    """The head's draft in a chain is that of a head which read the same text from the start."""
    same, cases, others = 0, 0, 0
    with drafting(Kind(("ngram-simple", "draft-mtp"))) as core, drafting(MTP) as fresh:
        for prompt in prompts(MTP, 2):
            for n in range(40, 100, 5):
                core.rollback.clear(core.slots[0])
                (turn,) = run(core, request(prompt, n))
                others += turn.timings.drafters.get("ngram-simple", {}).get("accepted", 0)
                fresh.rollback.clear(fresh.slots[0])
                run(fresh, request(core.slots[0].tokens.view().tolist(), 0))
                in_chain, alone = (drafts_of(c, 0, turn.tokens[-1], only="draft-mtp") for c in (core, fresh))
                same += in_chain.tokens == alone.tokens
                cases += 1
    assert others > 100
    assert same >= 0.9 * cases


@pytest.mark.parametrize("only", ["ngram-simple", "draft-mtp", "none"])
def test_a_request_may_ask_for_one_member(only: str) -> None:
    with drafting(THREE) as core:
        (turn,) = run(core, request(repeating(THREE), 48, speculative=SpeculativeParams(type=only)))
        assert set(turn.timings.drafters) == ({only} - {"none"})
        assert (turn.timings.draft_n > 0) == (only != "none")


def test_the_state_of_a_member_that_does_not_fit_is_dropped_alone() -> None:
    with drafting(CHAIN) as core:
        chain = chain_of(core)
        run(core, request(prompts(CHAIN, 1)[0], 24))
        tokens = core.slots[0].tokens.view().copy()
        fit, state = chain.fit(0), captured(chain)
    with drafting(Kind(("ngram-mod", "draft-mtp"), options={"type_k": "q8_0"})) as core:
        chain = chain_of(core)
        assert chain.unfit(fit, len(tokens), len(state.context), len(state.spec)) is None
        left_out = chain.apply(0, state, tokens, partial=False)
        assert left_out.startswith("draft-mtp: type_k: stored f16, running q8_0")
        (head,) = (m for m in chain.members if m.name == "draft-mtp")
        assert head.n_tokens(0) == 0
        assert chain.n_tokens(0) == len(tokens)
    with drafting(Kind(("draft-mtp", "ngram-simple"))) as core:
        chain = chain_of(core)
        assert chain.apply(0, state, tokens, partial=False) == "ngram-simple: not in the file"


def test_a_chain_none_of_whose_members_fits_refuses() -> None:
    with drafting(CHAIN) as core:
        chain = chain_of(core)
        run(core, request(prompts(CHAIN, 1)[0], 24))
        tokens = core.slots[0].tokens.view().copy()
        fit, state = chain.fit(0), captured(chain)
        head = orjson.loads(fit)
        for member in head["members"]:
            member["version"] = 99
        reason = chain.unfit(orjson.dumps(head), len(tokens), len(state.context), len(state.spec))
        assert reason is not None
        assert all(name in reason for name in CHAIN.types)
        assert chain.unfit(orjson.dumps({**head, "members": 3}), 9, 0, 0)
        with pytest.raises(DraftStateError):
            chain.apply(0, DraftState(b"", _pack([])), tokens, partial=False)
        assert chain.n_tokens(0) == 0


def test_a_block_of_one_drafter_is_none_of_a_chain_and_the_reverse() -> None:
    with drafting(MTP) as one, drafting(CHAIN) as many:
        for core in (one, many):
            run(core, request(prompts(CHAIN, 1)[0], 8))
        n = len(one.slots[0].tokens)
        assert "kind of drafter" in (many.drafter.unfit(one.drafter.fit(0), n, 0, 0) or "")
        assert "kind of drafter" in (one.drafter.unfit(many.drafter.fit(0), n, 0, 0) or "")


def test_a_part_way_state_needs_no_context_bytes_of_a_head() -> None:
    with drafting(CHAIN) as core:
        run(core, request(prompts(CHAIN, 1)[0], 8))
        assert core.drafter.state_size(0, partial=True) == 0
        assert len(captured(chain_of(core), partial=True).context) == 0


blobs = st.binary(max_size=20)


@given(st.lists(st.tuples(blobs, blobs, blobs), max_size=4), st.integers(0, 200))
def test_lengths_are_checked(parts: list[tuple[bytes, bytes, bytes]], cut: int) -> None:
    stored = [_Stored(fit, DraftState(context, spec)) for fit, context, spec in parts]
    context, spec = b"".join(c for _, c, _ in parts), _pack(stored)
    again = _unpack(DraftState(context, spec))
    assert [(p.fit, bytes(p.state.context), bytes(p.state.spec)) for p in again] == parts
    for damaged in (DraftState(context, spec[: cut % len(spec)]), DraftState(context + b"x", spec)):
        with pytest.raises(DraftStateError):
            _unpack(damaged)


@pytest.mark.parametrize(
    "types", [["draft-mtp", "draft-mtp"], ["none", "draft-mtp"], ["draft-simple"], ["eagle"]]
)
def test_chains_that_make_no_sense_are_refused(types: list[str]) -> None:
    model = model_of(HYBRID, True)
    target = LlamaContext(model, n_ctx=256, expose_hidden=True)
    try:
        with pytest.raises(DraftSetupError):
            make_drafter(types, DrafterSetup(model, target, 2, n_ctx=256))
    finally:
        target.close()


@pytest.mark.parametrize("kind", [SIMPLE, MOD], ids=["simple", "mod"])
def test_a_drafter_without_a_context_takes_no_context_bytes(kind: Kind) -> None:
    with drafting(kind) as core:
        run(core, request(repeating(kind), 8))
        assert core.drafter.state_size(0, partial=False) == 0
        assert core.drafter.decode_ns == 0
