"""Cutting a text before it is tokenised moves no token, and leaves no piece that is full of special tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_server.runtime import cuts
from spec_server.runtime import model as model_module
from spec_server.runtime.cuts import Cutter
from spec_server.runtime.errors import TooManyTokens
from spec_server.runtime.model import Model
from tests.runtime.drive import WINDOWED

RAW = 1 << 20  # ids of bytes that are in no special token begin here
SPACE = b" \n"


def split(data: bytes, specials: dict[int, bytes], left: frozenset[int], right: frozenset[int]) -> list[int]:
    """llama's own way (llama_vocab::impl::tokenizer_st_partition): the longest text first, each from the left."""
    parts: list[int | bytes] = [data]
    for token in sorted(specials, key=lambda t: -len(specials[t])):
        done: list[int | bytes] = []
        for part in parts:
            while isinstance(part, bytes) and (at := part.find(specials[token])) >= 0:
                before, part = part[:at], part[at + len(specials[token]) :]
                done += [before.rstrip(SPACE) if token in left else before, token]
                part = part.lstrip(SPACE) if token in right else part
            done.append(part)
        parts = done
    return [t for part in parts for t in ([part] if isinstance(part, int) else [RAW + b for b in part])]


texts = st.text("ab \n", min_size=1, max_size=4).map(str.encode)
vocabularies = st.lists(texts, min_size=1, max_size=5, unique=True).map(lambda t: dict(enumerate(t)))


@pytest.mark.property
@settings(deadline=None, max_examples=500)
@given(
    st.text("ab \n", max_size=60).map(str.encode),
    vocabularies,
    st.frozensets(st.integers(0, 4)),
    st.frozensets(st.integers(0, 4)),
)
def test_pieces_have_the_tokens_of_the_whole(
    data: bytes, specials: dict[int, bytes], left: frozenset[int], right: frozenset[int]
) -> None:
    def tokens_of(part: bytes) -> list[int]:
        return split(part, specials, left, right)

    cutter = Cutter(specials, lambda run: next(iter(tokens_of(run)), None), left, bool(left | right), apart=0)
    pieces = list(cutter.pieces(data))
    assert b"".join(pieces) == data
    assert [t for piece in pieces for t in tokens_of(piece)] == tokens_of(data)


@pytest.mark.property
def test_a_cut_is_found_where_special_tokens_touch_and_hold_each_other() -> None:
    specials = dict(enumerate([b"<a>", b"<a><b>", b"<b>", b"aa", b"a"]))
    cutter = Cutter(specials, lambda run: split(run, specials, frozenset(), frozenset())[0], apart=0)
    assert list(cutter.pieces(b"x<a><b>x<b>xaaax")) == [b"x", b"<a><b>x", b"<b>x", b"aaax"]


@pytest.mark.property
def test_the_unknown_token_in_raw_text_is_no_special_token_at_its_place() -> None:
    """ "ab" and "bcd" overlap, the longer one wins, and for the "a" that is left there may be no token."""
    specials = {0: b"<unk>", 1: b"ab", 2: b"bcd"}
    cutter = Cutter(specials, lambda run: 0 if run == b"abcd" else 2, apart=0)
    assert list(cutter.pieces(b"xabcdxbcd")) == [b"xabcdx", b"bcd"]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(WINDOWED, vocab_only=True)


@pytest.mark.model
@pytest.mark.parametrize("parse_special", [True, False])
def test_a_model_says_the_same_of_a_long_text_cut_or_whole(
    model: Model, monkeypatch: pytest.MonkeyPatch, parse_special: bool
) -> None:
    rng = random.Random(5)
    words = [
        "<|im_start|>",
        "<|im_end|>",
        "<file_sep>",
        "<|im_",
        "|>",
        "user\n",
        " a",
        "é",
        "\x04",
        "  ",
        "<",
    ]
    for _ in range(20):
        text = "".join(rng.choices(words, k=2000))
        assert len(text) > model_module._SHORT
        cut = model.tokenize(text, True, parse_special)
        with monkeypatch.context() as patched:
            patched.setattr(model_module, "_SHORT", len(text) * 2)
            assert cut == model.tokenize(text, True, parse_special)


@pytest.mark.model
def test_no_piece_has_many_special_tokens(model: Model) -> None:
    pieces = list(model._cutters[True].pieces(b"<|im_start|>a<|im_end|>\n" * 5000))
    assert max(piece.count(b"<|im") for piece in pieces) <= cuts.APART + 1


@pytest.mark.model
def test_a_text_of_too_many_tokens_is_left_before_its_end(model: Model) -> None:
    text = "<|im_start|>user\na<|im_end|>\n" * 2000
    n_tokens = len(model.tokenize(text))
    assert len(model.tokenize(text, at_most=n_tokens)) == n_tokens
    with pytest.raises(TooManyTokens) as stopped:
        model.tokenize(text, at_most=100)
    assert 100 < stopped.value.n_tokens < n_tokens


@pytest.mark.model
@pytest.mark.parametrize(
    "text", ["a" * 9000, "hello, world " * 900, "\x04" * 9000, "\x04a" * 9000, "é" * 9000]
)
def test_no_text_has_fewer_tokens_than_its_bytes_say(model: Model, text: str) -> None:
    """SmolLM2's vocabulary has no token for some bytes, and such a byte has none."""
    n_tokens, fewest = len(model.tokenize(text, False)), model.fewest_tokens(text.encode())
    assert fewest <= n_tokens
    assert (fewest > 0) == (n_tokens > 0)
