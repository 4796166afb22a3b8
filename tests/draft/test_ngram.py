"""n-gram drafts: the index against a plain search, the pool and its views, and what one text may know of another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.base import DraftRequest
from draft.ngram import NgramModDrafter, NgramSimpleDrafter
from draft.ngram_pool import NgramPool, packed_size, unpack
from draft.text_index import TextIndex
from spec_server.runtime.batch import Batch
from tests.draft.setups import HYBRID, MOD, SIMPLE, drafting, ints, prompts, repeating
from tests.engine.harness import filler, model_of, request, run

END = frozenset({0})
texts = st.lists(st.integers(1, 3), max_size=60)


def earlier(text: list[int], n: int) -> list[int]:
    """Ends of the earlier occurrences of the last n tokens, latest first, by plain search."""
    if len(text) < n:
        return []
    return [e for e in range(len(text) - 2, n - 2, -1) if text[e + 1 - n : e + 1] == text[-n:]]


def simple(n: int = 3, m: int = 8, hits: int = 1, slots: int = 1) -> NgramSimpleDrafter:
    return NgramSimpleDrafter(slots, size_n=n, size_m=m, min_hits=hits, end=END)


def mod(n: int = 3, n_min: int = 0, n_max: int = 8, slots: int = 1, bits: int = 10) -> NgramModDrafter:
    return NgramModDrafter(slots, n_match=n, n_min=n_min, n_max=n_max, end=END, n_vocab=100, pool_bits=bits)


def ask(
    drafter: NgramSimpleDrafter | NgramModDrafter, text: list[int], seq_id: int = 0, **fields: object
) -> list[int]:
    """The draft behind `text`, whose last token is in no context yet."""
    values: dict[str, object] = {"n_max": drafter.n_max, **fields}
    (draft,) = drafter.propose([DraftRequest(seq_id, ints(text[:-1]), text[-1], **values)])  # type: ignore[arg-type]
    return draft.tokens


def read(drafter: NgramSimpleDrafter | NgramModDrafter, text: list[int], seq_id: int = 0) -> None:
    """As prompt chunks would."""
    drafter.begin(seq_id, ints([]))
    batch = Batch(max(1, len(text)))
    batch.add(seq_id, text, 0)
    drafter.process(batch)


# -- the index


@given(texts, st.integers(1, 5), st.integers(1, 3))
def test_whether_it_may_recur_is_known_before_the_token_is_there(text: list[int], n: int, token: int) -> None:
    index = TextIndex(n)
    index.extend(text)
    assert index.may_recur(token) == bool(earlier([*text, token], n))


@given(texts, st.integers(1, 3), st.integers(0, 60))
def test_who_is_not_asked_had_nothing_to_say(text: list[int], n: int, n_unread: int) -> None:
    """What was not read of the text is read for that."""
    text = [1, *text, 1]
    n_read = max(1, len(text) - 1 - n_unread)
    drafter = simple(n)
    read(drafter, text[:n_read])
    if not drafter.may_be_free(0, np.array(text[:-1], np.int32), text[-1]):
        assert not ask(drafter, text)


@given(texts, st.integers(1, 5))
def test_occurrences_are_those_of_a_plain_search(text: list[int], n: int) -> None:
    index = TextIndex(n)
    index.extend(text)
    assert list(index.occurrences()) == earlier(text, n)


@given(texts, texts, st.integers(1, 5), st.integers(0, 60))
def test_a_cut_leaves_no_trace(text: list[int], more: list[int], n: int, at: int) -> None:
    index, fresh = TextIndex(n), TextIndex(n)
    index.extend(text)
    index.cut(at)
    index.extend(more)
    fresh.extend([*text[:at], *more])
    assert index.tokens == fresh.tokens
    assert index.keys == fresh.keys
    assert index._before == fresh._before
    assert index._latest == fresh._latest


@given(texts, st.integers(1, 4), st.integers(1, 20))
def test_a_draft_is_what_followed_the_longest_match(text: list[int], n: int, m: int) -> None:
    if len(text) < 2:
        return
    tokens = ask(simple(n, m), text)
    places = earlier(text, n)
    assert bool(tokens) == bool(places)
    if not tokens:
        return

    def length(end: int) -> int:
        k = 0
        while k <= end and text[end - k] == text[-1 - k]:
            k += 1
        return k

    most = max(n, m)
    longest = max(min(most, length(e)) for e in places[:16])
    best = next(e for e in places if min(most, length(e)) == longest)
    expected = [*text]
    for i in range(min(longest, m)):
        expected.append(expected[best + 1 + i])
    assert tokens == expected[len(text) :]


def test_a_text_that_repeats_itself_is_drafted_past_its_end() -> None:
    assert ask(simple(3, 8), [1, 2, 3, 4] * 5) == [1, 2, 3, 4, 1, 2, 3, 4]
    assert ask(mod(3), [1, 2, 3, 4] * 5) == [1, 2, 3, 4, 1, 2, 3, 4]


def test_a_longer_match_is_worth_a_longer_draft() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 99]
    assert ask(simple(3, 8), [*text, 3, 4, 5]) == [6, 7, 8]
    assert ask(simple(3, 8), [*text, 1, 2, 3, 4, 5]) == [6, 7, 8, 9, 10]


def test_end_tokens_end_a_draft() -> None:
    text = [1, 2, 3, 4, 0, 5, 6, 7] * 2
    assert ask(simple(3, 8), [*text, 1, 2, 3]) == [4, 0]
    assert ask(mod(3), [*text, 1, 2, 3]) == [4, 0]


@pytest.mark.parametrize(("hits", "expected"), [(1, [4, 5, 6]), (2, [4, 5, 6]), (3, [])])
def test_matches_needed(hits: int, expected: list[int]) -> None:
    assert ask(simple(3, 3, hits), [9, 1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == expected


@pytest.mark.parametrize(("p_min", "n"), [(0.0, 3), (0.5, 3), (0.66, 1), (0.67, 0)])
def test_a_token_that_few_places_agree_on_is_below_p_min(p_min: float, n: int) -> None:
    """Two places go on with 4, one of them with 5 after it: 2/3, then 1/3 where the other is not asked."""
    text = [1, 2, 3, 4, 6, 6, 9, 1, 2, 3, 4, 5, 5, 8, 1, 2, 3]
    tokens = ask(simple(3, 3), text, p_min=p_min)
    assert tokens == [4, 5, 5][: 1 if p_min == 0.5 else n]


def test_a_pool_token_seen_once_is_below_a_high_p_min() -> None:
    assert ask(mod(3), [1, 2, 3, 4] * 5, p_min=0.5)
    assert not ask(mod(3), [1, 2, 3, 4] * 5, p_min=0.6)


@pytest.mark.parametrize(("n_min", "n_max", "n"), [(4, 8, 4), (5, 8, 0), (8, 3, 3), (8, 4, 4)])
def test_a_short_draft_of_ngram_mod_is_not_used_unless_no_more_was_asked(
    n_min: int, n_max: int, n: int
) -> None:
    drafter = mod(3, n_min=n_min, slots=2)
    read(drafter, [1, 2, 3, 4, 5, 6, 7], 0)  # the pool knows four tokens behind 1, 2, 3
    read(drafter, [9, 9], 1)
    assert len(ask(drafter, [9, 9, 1, 2, 3], 1, n_max=n_max)) == n


def test_only_what_the_slot_kept_is_known() -> None:
    drafter = simple(3, 8)
    read(drafter, [1, 2, 3, 4, 5, 6, 7])
    batch = Batch(8)
    batch.add(0, [1, 2, 3, 8, 8], 7, n_draft=3)
    drafter.process(batch)
    drafter.truncate(0, 7)  # the request failed: nothing was accepted
    assert drafter.n_tokens(0) == 7
    assert ask(drafter, [1, 2, 3, 4, 5, 6, 7, 2, 3, 8]) == []


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["read", "cut", "erase"]), texts, st.integers(0, 60)), max_size=8))
def test_the_index_is_a_function_of_the_present_text(steps: list[tuple[str, list[int], int]]) -> None:
    """Whatever was appended and cut before: other conversations, rewinds, an erase."""
    drafter, text = simple(2, 8), [1]
    for what, more, at in steps:
        if what == "read":
            batch = Batch(80)
            if more:
                batch.add(0, more, len(text) - 1)
                drafter.process(batch)
                text[-1:] = [*more, 1]
        elif what == "cut":
            text = [*text[: min(at, len(text) - 1)], 1]
            drafter.truncate(0, len(text) - 1)
            drafter.begin(0, ints(text[:-1]))
        else:
            text = [1]
            drafter.truncate(0, 0)
    assert ask(drafter, text) == ask(simple(2, 8), text)


# -- the pool


def test_another_slots_text_is_drafted_from_once_a_conversation_begins() -> None:
    drafter = mod(3, slots=2)
    read(drafter, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    read(drafter, [9, 9], 1)
    assert ask(drafter, [9, 9, 1, 2, 3], 1) == [4, 5, 6, 7, 8]


def test_what_comes_later_is_not_seen_before_the_next_conversation() -> None:
    drafter = mod(3, slots=2)
    read(drafter, [9, 9], 1)
    read(drafter, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    assert ask(drafter, [9, 9, 1, 2, 3], 1) == []
    drafter.truncate(1, 0)
    read(drafter, [9, 9], 1)
    assert ask(drafter, [9, 9, 1, 2, 3], 1) == [4, 5, 6, 7, 8]


def test_a_slots_former_text_does_not_feed_its_next_one() -> None:
    for drafter in (mod(3), simple(3)):
        read(drafter, [1, 2, 3, 4, 5, 6, 7, 8])
        drafter.truncate(0, 0)
        read(drafter, [9, 9])
        assert ask(drafter, [9, 9, 1, 2, 3]) == []


def test_a_conversation_that_keeps_most_of_its_text_keeps_its_view() -> None:
    drafter = mod(3, slots=2)
    read(drafter, [9, 9, 8, 7, 6, 5], 1)
    read(drafter, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    drafter.truncate(1, 4)
    drafter.begin(1, ints([9, 9, 8, 7]))
    assert ask(drafter, [9, 9, 8, 7, 1, 2, 3], 1) == []
    drafter.truncate(1, 1)
    drafter.begin(1, ints([9]))
    assert ask(drafter, [9, 1, 2, 3], 1) == [4, 5, 6, 7, 8]


def test_the_pool_is_bounded_and_forgets() -> None:
    pool = NgramPool(6)
    rng = np.random.default_rng(1)
    for key in rng.integers(0, 1 << 61, 5000).tolist():
        pool.put(key, 7, 0)
    view = pool.view_for(1)
    assert view.n_entries <= 64
    assert len(view.pack()) <= packed_size(64)
    assert pool.view_for(0).n_entries == 0


keys = st.integers(0, 10**6).map(lambda n: (n + 1) * 0x9E37_79B9_7F4A_7C15 % ((1 << 61) - 1))


@given(st.dictionaries(keys, st.integers(0, 99), max_size=40))
def test_a_stored_view_answers_as_the_live_one(entries: dict[int, int]) -> None:
    pool = NgramPool(8)
    for key, token in entries.items():
        pool.put(key, token, 3)
    view = pool.view_for(0)
    again = unpack(view.pack(), 8, 100)
    assert again.pack() == view.pack()
    for key, token in entries.items():
        assert again.follower(key) == view.follower(key)
        assert view.follower(key) in (token, -1)


@given(st.binary(max_size=64), st.integers(0, 200))
def test_bytes_that_are_no_view_raise_one_error(noise: bytes, at: int) -> None:
    pool = NgramPool(8)
    for key in range(1, 1 << 61, 1 << 56):
        pool.put(key, 5, 1)
    good = bytearray(pool.view_for(0).pack())
    good[at % len(good) :][: len(noise)] = noise
    for data in (noise, bytes(good[: at % len(good)]), bytes(good) + noise):
        try:
            view = unpack(data, 8, 100)
        except ValueError:
            continue
        assert -1 <= view.follower(1) < 100


# -- on a model


@pytest.mark.parametrize("kind", [SIMPLE, MOD], ids=["simple", "mod"])
def test_the_next_request_in_a_slot_counts_as_in_a_fresh_process(kind: object) -> None:
    """After 800 tokens that repeat themselves, a text of another kind; also after an erase."""
    after = prompts(SIMPLE, 3)[2]
    with drafting(kind) as core:  # type: ignore[arg-type]
        (alone,) = run(core, request(after, 64))
    for erased in (False, True):
        with drafting(kind) as core:  # type: ignore[arg-type]
            run(core, request(repeating(SIMPLE, 40).tokens[:800], 32))
            if erased:
                core.rollback.clear(core.slots[0])
            (turn,) = run(core, request(after, 64))
        assert turn.tokens == alone.tokens
        assert turn.counts[2:] == alone.counts[2:]


@pytest.mark.parametrize("kind", [SIMPLE, MOD], ids=["simple", "mod"])
def test_prompts_that_share_a_beginning_count_as_in_a_fresh_process(kind: object) -> None:
    model = model_of(HYBRID)
    head = filler(model, 50).tokens
    others = [(*head, *filler(model, 40, seed).tokens) for seed in range(1, 4)]
    with drafting(kind) as core:  # type: ignore[arg-type]
        for _ in range(3):
            run(core, request(prompts(SIMPLE, 1)[0], 48))
        warm = [run(core, request(p, 48))[0].counts[2:] for p in others]
    for prompt, counts in zip(others, warm, strict=True):
        with drafting(kind) as core:  # type: ignore[arg-type]
            assert run(core, request(prompt, 48))[0].counts[2:] == counts


@pytest.mark.parametrize("kind", [SIMPLE, MOD], ids=["simple", "mod"])
def test_a_context_that_fills_up_ends_the_request_and_nothing_else(kind: object) -> None:
    with drafting(kind, n_ctx=256) as core:  # type: ignore[arg-type]
        (turn,) = run(core, request(repeating(SIMPLE, 12).tokens[:200], 400))
        assert turn.finished.reason == "length"
        assert run(core, request(prompts(SIMPLE, 1)[0].tokens[:40], 8))[0].timings.predicted_n == 8


def test_a_repeated_text_is_mostly_accepted() -> None:
    with drafting(SIMPLE) as core:
        (turn,) = run(core, request(prompts(SIMPLE, 1)[0], 400))
        t = turn.timings
        assert t.draft_n_accepted > 0.5 * t.draft_n > 50
