"""A request's sampling settings hold with drafts, and its seed alone decides its text; on the tiny models.

The first rows are those of a report elsewhere (google-ai-edge/LiteRT-LM#3017), where the speculative path
ignored the request's settings.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draft.base import EMPTY_DRAFT, Draft
from draft.none import NoDrafter
from spec_server.engine.base import SamplingParams, SpeculativeParams
from spec_server.engine.core import EngineCore
from spec_server.engine.errors import InvalidRequest
from spec_server.engine.sample import (
    AcceptSampler,
    GreedySampler,
    MatchSampler,
    Rule,
    bans_everything,
    make_sampler,
)
from spec_server.runtime.batch import Batch
from spec_server.runtime.errors import LlamaError
from spec_server.runtime.sampler import SamplerChain
from tests.draft.setups import MTP, RECURRENT, SIMPLE, Kind, drafting, prompts, repeating, setup
from tests.engine import toy
from tests.engine.harness import HYBRID, WINDOW, Prompt, Setup, Turn, core_of, request, run, serve

pytestmark = pytest.mark.model

ANSWER = 24
HOT = SamplingParams(temperature=1.2)
KINDS = (MTP, Kind(("draft-simple",), HYBRID, WINDOW), RECURRENT, SIMPLE)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.id)


def say(
    core: EngineCore, prompt: Prompt, sampling: SamplingParams, n: int = ANSWER, **fields: object
) -> Turn:
    return run(core, request(prompt, n, sampling=sampling, **fields))[0]


# -- settings hold with drafts


@each_kind
def test_without_a_seed_the_texts_differ_and_at_temperature_zero_they_do_not(kind: Kind) -> None:
    prompt = repeating(kind)
    with drafting(kind) as core:
        hot = [say(core, prompt, HOT) for _ in range(10)]
        cold = [say(core, prompt, SamplingParams(temperature=0.0)) for _ in range(10)]
    assert len({t.text for t in hot}) >= 5
    assert len({t.text for t in cold}) == 1
    assert sum(t.timings.draft_n for t in hot) > 0


@each_kind
def test_the_best_token_alone_is_greedy_at_any_temperature(kind: Kind) -> None:
    with drafting(kind) as core:
        for prompt in prompts(kind, 3):
            greedy = say(core, prompt, SamplingParams(temperature=0.0)).tokens
            assert say(core, prompt, replace(HOT, top_k=1)).tokens == greedy
            # the same by the whole chain: nothing but the best survives a top_p or min_p like these
            assert say(core, prompt, replace(HOT, top_p=1e-6)).tokens == greedy
            assert say(core, prompt, replace(HOT, min_p=1.0, top_p=1.0)).tokens == greedy


@each_kind
@pytest.mark.parametrize("seed", [None, 7])
def test_a_token_with_a_bias_of_minus_100_never_comes(kind: Kind, seed: int | None) -> None:
    [prompt] = prompts(kind, 1)
    sampling = replace(HOT, seed=seed)
    with drafting(kind) as core:
        said = Counter(t for _ in range(4) for t in say(core, prompt, sampling).tokens)
        common = [token for token, _ in said.most_common(3)]
        banned = replace(sampling, logit_bias=tuple((t, -100.0) for t in common))
        turns = [say(core, prompt, banned) for _ in range(4)]
    assert not {t for turn in turns for t in turn.tokens} & set(common)


@each_kind
def test_penalties_look_at_what_was_drafted_too(kind: Kind) -> None:
    # A penalty that forbids every repetition, within one draft as well.
    prompt = repeating(kind)
    sampling = SamplingParams(temperature=0.8, presence_penalty=1000.0, repeat_last_n=-1)
    with drafting(kind) as core:
        for seed in (None, 3):
            tokens = say(core, prompt, replace(sampling, seed=seed)).tokens
            assert len(set(tokens)) == len(tokens)
            assert not set(tokens) & set(prompt.tokens)


# -- a seed's text


@each_kind
def test_a_seeds_text_depends_on_no_draft(kind: Kind) -> None:
    [prompt] = prompts(kind, 1)
    lengths = [SpeculativeParams(type="none"), *(SpeculativeParams(n_max=n) for n in (1, 2, 3))]
    with drafting(kind) as core:
        texts = {
            tuple(say(core, prompt, replace(HOT, seed=seed), speculative=wanted).tokens): seed
            for seed in (1, 2)
            for wanted in lengths
        }
    assert sorted(texts.values()) == [1, 2]


def test_a_seeds_text_is_that_of_every_drafter_and_of_none() -> None:
    [prompt] = prompts(MTP, 1)
    sampling = replace(HOT, seed=11)
    with core_of(Setup(HYBRID)) as core:
        plain = say(core, prompt, sampling).tokens
    for kind in KINDS:
        if kind.path == HYBRID:
            with drafting(kind) as core:
                assert say(core, prompt, sampling).tokens == plain


def test_neighbours_do_not_move_a_seeds_text() -> None:
    asked = [request(p, ANSWER, sampling=replace(HOT, seed=5)) for p in prompts(MTP, 3)]
    with core_of(setup(MTP, n_slots=3)) as core:
        alone = [run(core, one)[0].tokens for one in asked]
    with core_of(setup(MTP, n_slots=3)) as core:
        together = [turn.tokens for turn in run(core, *asked)]
    assert together == alone


async def _two_turns(tmp_path: Path, *, with_restore: bool, seed: int | None) -> Turn:
    [prompt] = prompts(MTP, 1)
    sampling = replace(HOT, seed=seed)
    async with serve(setup(MTP), tmp_path) as server:
        first = await server.ask(request(prompt, ANSWER, sampling=replace(HOT, seed=1)))
        if with_restore:
            await server.save(0, "a.bin")
            await server.erase(0)
            await server.restore(0, "a.bin")
        longer = [*prompt.tokens, *first.tokens, *prompt.tokens[-8:]]
        return await server.ask(request(longer, ANSWER, sampling=sampling))


@pytest.mark.anyio
async def test_a_restore_does_not_move_a_seeds_text(tmp_path: Path, anyio_backend: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    going_on = await _two_turns(tmp_path / "a", with_restore=False, seed=4)
    restored = await _two_turns(tmp_path / "b", with_restore=True, seed=4)
    assert restored.tokens == going_on.tokens
    assert restored.counts == going_on.counts
    assert going_on.timings.draft_n_accepted > 0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# -- which sampler


@pytest.mark.parametrize(
    ("params", "rule", "kind"),
    [
        (SamplingParams(temperature=0.0), "block", GreedySampler),
        (SamplingParams(temperature=1.0, top_k=1), "block", GreedySampler),
        (SamplingParams(temperature=0.0, logit_bias=((5, -math.inf),)), "block", GreedySampler),
        (SamplingParams(temperature=0.0, logit_bias=((5, -math.inf), (6, -1.0))), "block", AcceptSampler),
        (SamplingParams(temperature=0.0, repeat_penalty=1.1), "block", AcceptSampler),
        (SamplingParams(), "block", AcceptSampler),
        (SamplingParams(), "token", AcceptSampler),
        (SamplingParams(), "exact-match", MatchSampler),
        (SamplingParams(seed=0), "block", MatchSampler),
    ],
)
def test_which_sampler_serves_a_request(params: SamplingParams, rule: Rule, kind: type) -> None:
    assert isinstance(make_sampler(params, 100, rule), kind)


def test_the_best_token_that_is_not_banned_is_greedy_and_the_rows_stay_as_they_were() -> None:
    none = np.zeros(0, np.int32)
    rows = np.asarray([[0, 9, 5, 1], [9, 8, 0, 7], [1, 2, 3, 9]], np.float32).view()
    rows.flags.writeable = False
    sampler = make_sampler(SamplingParams(temperature=0.0), 4, suppressed=(1, 3, 99))
    assert isinstance(sampler, GreedySampler)
    assert sampler.pick(rows[:1], EMPTY_DRAFT, 0, none) == [2]
    assert sampler.pick(rows[1:2], EMPTY_DRAFT, 0, none) == [0]
    assert sampler.pick(rows, Draft([2, 0]), 0, none) == [2, 0, 2]
    assert sampler.pick(rows, Draft([1, 0]), 0, none) == [2]
    assert sampler.pick(rows, Draft([2, 3]), 0, none) == [2, 0]
    free = make_sampler(SamplingParams(temperature=0.0), 4)
    assert free.pick(rows, Draft([1, 0]), 0, none) == [1, 0, 3]
    with pytest.raises(LlamaError, match="no token is left"):
        make_sampler(SamplingParams(temperature=0.0), 4, suppressed=range(4)).pick(
            rows[:1], EMPTY_DRAFT, 0, none
        )


def bans(*kept: int, n_vocab: int = 50) -> tuple[tuple[int, float], ...]:
    return tuple((token, -math.inf) for token in range(n_vocab) if token not in kept)


@pytest.mark.parametrize(
    ("logit_bias", "suppressed", "expected"),
    [
        ((), (), False),
        (bans(), (), True),
        (bans(7), (), False),
        (bans(7), (7,), True),
        (bans(7), (8, 9), False),
        (bans(7) * 2, (8, 9), False),
        ((*bans(7), (7, -1e6)), (), False),
        ((*bans(7), (7, 3.0)), (7,), True),
    ],
)
def test_a_request_that_bans_every_token_is_known_at_once(
    logit_bias: tuple[tuple[int, float], ...], suppressed: tuple[int, ...], expected: bool
) -> None:
    assert bans_everything(SamplingParams(logit_bias=logit_bias), 50, suppressed) is expected


@pytest.mark.anyio
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_request_that_bans_every_token_is_refused(
    tmp_path: Path, anyio_backend: str, temperature: float
) -> None:
    async with serve(Setup(WINDOW, n_ctx=64), tmp_path) as server:
        eog = server.core.model.eog
        for kept, error in (((), InvalidRequest), (tuple(eog), InvalidRequest), ((500, *eog), None)):
            sampling = SamplingParams(temperature, logit_bias=bans(*kept, n_vocab=4096))
            asked = request([5, 6], 4, sampling=sampling, ignore_eos=True)
            if error is None:
                assert (await server.ask(asked)).tokens == [500] * 4
            else:
                with pytest.raises(error, match="logit_bias: no token is left"):
                    await server.ask(asked)


@pytest.mark.parametrize("seed", [3, None])
def test_a_draft_model_that_knows_none_of_the_tokens_left_proposes_something_all_the_same(
    seed: int | None,
) -> None:
    """Its vocabulary may lack them. The proposal is rejected; an error would end every request in the step."""
    params = SamplingParams(temperature=1.0, seed=seed, logit_bias=bans(49))
    drafting = make_sampler(params, 50).drafting(5, np.zeros(0, np.int32))
    token, proposal = drafting.draw(np.zeros(40, np.float32), ())
    assert token == 0
    assert proposal is None or [part.tolist() for part in proposal] == [[0], [1.0]]


def test_drafts_are_greedy_for_exact_match_and_coupled_where_a_seed_is_given() -> None:
    none = np.zeros(0, np.int32)
    assert make_sampler(SamplingParams(seed=1), 100, "exact-match").drafting(0, none).is_greedy
    assert not make_sampler(SamplingParams(seed=1), 100, "block").drafting(0, none).is_greedy
    assert make_sampler(SamplingParams(temperature=0.0), 100).drafting(0, none).is_greedy


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("n_draft_vocab", [90, 100, 110])
def test_a_draft_models_vocabulary_may_be_a_little_larger_or_smaller(
    seed: int | None, n_draft_vocab: int
) -> None:
    sampler = make_sampler(SamplingParams(seed=seed, temperature=5.0, top_k=0, top_p=1.0, min_p=0.0), 100)
    none = np.zeros(0, np.int32)
    row = np.linspace(0.0, 1.0, n_draft_vocab, dtype=np.float32)
    for position in range(300):
        token, q = sampler.drafting(position, none).draw(row, [])
        assert 0 <= token < min(100, n_draft_vocab)
        assert q is None or q[0].max() < min(100, n_draft_vocab)


# -- the distribution, end to end


def text_probabilities(
    core: EngineCore, prompt: Prompt, sampling: SamplingParams, n: int
) -> dict[toy.Text, float]:
    """Of every text of n tokens without an end token, by decoding each of them without a drafter.

    The engine reads the prompt: other batches round differently, and at the edge of min_p that makes other texts
    possible.
    """
    no_end = [(token, -math.inf) for token in core.model.eog]
    chain = SamplerChain(core.model.n_vocab, logit_bias=no_end, **_chain_settings(sampling))
    say(core, prompt, sampling, 1)
    n_past = core.target.n_tokens(0)
    assert n_past == len(prompt.tokens)
    state = core.target.read_state(
        0, memoryview(bytearray(core.target.state_size(0, partial=False))), partial=False
    )
    batch = Batch(core.target.n_batch)

    def grow(text: toy.Text, weight: float) -> dict[toy.Text, float]:
        row = core.target.logits(0, 1)[0]
        ids, probs = chain.apply(row, np.asarray([*prompt.tokens, *text], np.int32))
        return {(*text, int(i)): weight * float(p) for i, p in zip(ids, probs, strict=True)}

    known = grow((), 1.0)
    for _ in range(n - 1):
        grown: dict[toy.Text, float] = {}
        for text, weight in known.items():
            core.target.write_state(0, state, n_past, partial=False)
            for i, token in enumerate(text):
                batch.clear()
                batch.add(0, [token], n_past + i, output="last")
                core.target.decode(batch)
            grown |= grow(text, weight)
        known = grown
    batch.close()
    return known


def _chain_settings(sampling: SamplingParams) -> dict[str, float]:
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "repeat_last_n")
    return {name: getattr(sampling, name) for name in names}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.5, top_k=3, top_p=1.0, min_p=0.0),
        SamplingParams(temperature=0.8, top_k=4, min_p=0.1, presence_penalty=1.0),
    ],
)
def test_texts_of_a_model_with_its_drafter_have_the_probabilities_of_the_model_alone(
    sampling: SamplingParams, seeded: bool
) -> None:
    n, n_texts = 4, 1500
    [prompt] = prompts(MTP, 1)
    with core_of(Setup(HYBRID)) as plain:
        assert isinstance(plain.drafter, NoDrafter)
        expected = text_probabilities(plain, prompt, sampling, n)
    counts: Counter[toy.Text] = Counter()
    n_drafted = n_accepted = 0
    with drafting(MTP) as core:
        for i in range(n_texts):
            turn = say(core, prompt, replace(sampling, seed=i if seeded else None), n)
            counts[tuple(turn.tokens)] += 1
            n_drafted += turn.timings.draft_n
            n_accepted += turn.timings.draft_n_accepted
    assert 0 < n_accepted < n_drafted
    fit = toy.fit(counts, expected)
    assert fit.is_good, fit
