"""The sampler: the fast path against the whole chain, the chain against the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from spec_server.runtime.errors import LlamaError
from spec_server.runtime.sampler import SamplerChain, argmax_rows

N_VOCAB = 5000
NONE = np.zeros(0, np.int32)
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typ_p": 1.0}

Floats = npt.NDArray[np.float32]


def row(seed: int, spread: float = 3.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(N_VOCAB) * spread).astype(np.float32)


def softmax(x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    weights = np.exp(x.astype(np.float64) - x.max())
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result


def test_argmax() -> None:
    logits = np.array([[1, 3, 3], [5, 0, 0]], np.float32)
    assert argmax_rows(logits) == [1, 0]


def test_with_everything_off_it_is_a_softmax() -> None:
    ids, probs = SamplerChain(N_VOCAB, **OFF).apply(row(1), NONE)
    assert ids.tolist() == list(range(N_VOCAB))
    np.testing.assert_allclose(probs, softmax(row(1)), rtol=1e-12)


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_temperature(temperature: float) -> None:
    _, probs = SamplerChain(N_VOCAB, **{**OFF, "temperature": temperature}).apply(row(1), NONE)
    np.testing.assert_allclose(probs, softmax(row(1) / np.float32(temperature)), rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_without_temperature_the_best_is_left(temperature: float) -> None:
    ids, probs = SamplerChain(N_VOCAB, temperature=temperature, top_k=40).apply(row(2), NONE)
    assert (ids.tolist(), probs.tolist()) == ([int(row(2).argmax())], [1.0])


@pytest.mark.parametrize("top_k", [1, 2, 40, 300, N_VOCAB - 1])
def test_top_k(top_k: int) -> None:
    ids, probs = SamplerChain(N_VOCAB, **{**OFF, "top_k": top_k}).apply(row(3), NONE)
    assert ids.tolist() == sorted(np.argsort(-row(3))[:top_k].tolist())
    np.testing.assert_allclose(probs, softmax(row(3)[ids]), rtol=1e-12)


@pytest.mark.parametrize("top_k", [N_VOCAB, N_VOCAB + 1, 0, -1])
def test_top_k_off(top_k: int) -> None:
    ids, _ = SamplerChain(N_VOCAB, **{**OFF, "top_k": top_k}).apply(row(3), NONE)
    assert len(ids) == N_VOCAB


def test_min_p_and_top_p() -> None:
    probs = softmax(row(4))
    ids, _ = SamplerChain(N_VOCAB, **{**OFF, "min_p": 0.1}).apply(row(4), NONE)
    assert ids.tolist() == np.flatnonzero(probs >= 0.1 * probs.max()).tolist()
    order = np.argsort(-probs)
    n = int(np.searchsorted(np.cumsum(probs[order]), 0.9)) + 1
    ids, _ = SamplerChain(N_VOCAB, **{**OFF, "top_p": 0.9}).apply(row(4), NONE)
    assert ids.tolist() == sorted(order[:n].tolist())


def test_penalties_look_at_the_last_tokens_only() -> None:
    logits = row(5)
    best, second = np.argsort(-logits)[:2].tolist()
    chain = SamplerChain(
        N_VOCAB, **OFF, repeat_last_n=3, repeat_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    history = np.array([second, best, 7, best], np.int32)
    expected = logits.copy()
    for token, count in ((best, 2), (7, 1)):
        value = expected[token]
        expected[token] = value * 2 if value <= 0 else value / 2
        expected[token] -= count * 0.25 + 0.5
    for _ in range(2):  # nothing is left over from the call before
        _, probs = chain.apply(logits, history)
        np.testing.assert_allclose(probs, softmax(expected), rtol=1e-5)
    _, probs = chain.apply(logits, NONE)
    np.testing.assert_allclose(probs, softmax(logits), rtol=1e-12)


def test_biases() -> None:
    logits = row(6)
    best = int(logits.argmax())
    chain = SamplerChain(
        N_VOCAB, **{**OFF, "top_k": 3}, logit_bias=((best, -np.inf), (17, 100.0), (N_VOCAB, 5.0))
    )
    ids, probs = chain.apply(logits, NONE)
    assert 17 in ids
    assert best not in ids
    assert probs[ids.tolist().index(17)] > 0.999
    assert len(SamplerChain(N_VOCAB, logit_bias=((best, -np.inf),), top_k=1).apply(logits, NONE)[0]) == 1


@pytest.mark.property
@pytest.mark.parametrize("seed", range(60))
def test_the_fast_path_is_the_whole_chain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = row(seed, float(rng.choice([0.01, 1.0, 3.0, 30.0])))
    history = np.concatenate([np.argsort(-logits)[:20], rng.integers(0, N_VOCAB, 60)]).astype(np.int32)
    settings: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.5, 1.5])),
        "top_k": int(rng.choice([1, 5, 40, 200, 2000])),
        "top_p": float(rng.choice([0.5, 0.95, 1.0])),
        "min_p": float(rng.choice([0.0, 0.05, 0.2])),
        "typ_p": float(rng.choice([1.0, 0.8])),
    }
    if rng.random() < 0.5:
        settings |= {"repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
        settings |= {"repeat_last_n": int(rng.choice([-1, 0, 16, 64]))}
    if rng.random() < 0.5:
        settings["logit_bias"] = [(int(logits.argmax()), -np.inf), (77, 9.0), (int(history[3]), -2.0)]
    fast, whole = SamplerChain(N_VOCAB, **settings), SamplerChain(N_VOCAB, **settings)
    whole._top_k = 0  # nothing is left out before the chain
    for _ in range(3):  # the fast path learns how far below the best it has to look
        ids, probs = fast.apply(logits, history)
        all_ids, all_probs = whole.apply(logits, history)
        assert ids.tolist() == all_ids.tolist()
        np.testing.assert_array_equal(probs, all_probs)
        assert abs(probs.sum() - 1) < 1e-12


@pytest.mark.parametrize("value", [0.0, -np.inf])
def test_equal_logits(value: float) -> None:
    logits = np.full(N_VOCAB, value, np.float32)
    logits[5] = 0
    ids, probs = SamplerChain(N_VOCAB, top_k=4, top_p=1.0, min_p=0.0).apply(logits, NONE)
    assert len(ids) == (4 if value == 0 else 1)
    np.testing.assert_allclose(probs, 1 / len(ids))


def test_a_row_with_nan_is_an_error() -> None:
    logits = row(1)
    logits[100] = np.nan
    with pytest.raises(LlamaError, match="NaN"):
        SamplerChain(N_VOCAB).apply(logits, NONE)


@pytest.mark.parametrize("settings", [{}, OFF, {"temperature": 0.0}, {"top_k": 4}, {"repeat_penalty": 1.3}])
def test_where_every_token_is_banned_none_comes_out(settings: dict[str, Any]) -> None:
    bans = [(token, -np.inf) for token in range(N_VOCAB)]
    with pytest.raises(LlamaError, match="no token is left"):
        SamplerChain(N_VOCAB, **settings, logit_bias=bans).apply(row(1), NONE)
    ids, _ = SamplerChain(N_VOCAB, **settings, logit_bias=bans[1:]).apply(row(1), NONE)
    assert ids.tolist() == [0]


def test_what_is_infinite_is_all_there_is() -> None:
    logits = row(1)
    logits[[3, 8]] = np.inf
    ids, probs = SamplerChain(N_VOCAB, **OFF).apply(logits, NONE)
    assert (ids.tolist(), probs.tolist()) == ([3, 8], [0.5, 0.5])


def test_close_can_be_repeated() -> None:
    chain = SamplerChain(N_VOCAB)
    chain.close()
    chain.close()
