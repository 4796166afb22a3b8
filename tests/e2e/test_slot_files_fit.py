"""What of a file fits a server, section by section: a draft that does not fit is left out alone and named with the
reason, a target that does not fit is refused with the field and both values, and no slot changes for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from persistence.format import PAYLOAD_HEAD, Kind
from tests.e2e.conftest import Start
from tests.e2e.mutations import Parts, take_apart
from tests.e2e.served import Answer, Served, flags
from tests.e2e.slot_files import assert_unchanged, refused
from tests.e2e.texts import prompt_of

N = 24


@dataclass(frozen=True)
class Scene:
    """A saved conversation, how it goes on live, and its file taken apart."""

    first: Answer
    live: Answer
    parts: Parts


@pytest.fixture(scope="module")
def scene(double: Served, slot_dir: Path) -> Scene:
    first = double.ask(prompt_of(double, 90), N, 1, ignore_eos=True)
    double.save(1, "fit.bin")
    live = double.ask([*first.prompt, *first.tokens, 700], N, 1, ignore_eos=True)
    return Scene(first, live, take_apart(slot_dir / "fit.bin"))


# -- the draft block


def draft_blobs(parts: Parts) -> list[bytes]:
    block = parts.section(Kind.DRAFT)
    assert block is not None
    blobs, at = [], 8
    while at < len(block):
        (n,) = struct.unpack_from("<Q", block, at)
        blobs.append(block[at + 8 : at + 8 + n])
        at += 8 + n
    return blobs


def with_blobs(parts: Parts, blobs: list[bytes]) -> Parts:
    block = parts.section(Kind.DRAFT)
    assert block is not None
    data = block[:8] + b"".join(struct.pack("<Q", len(blob)) + blob for blob in blobs)
    return parts.with_section(Kind.DRAFT, data)


def fit_field(name: str, value: object) -> Callable[[Parts], bytes]:
    def change(parts: Parts) -> bytes:
        fit, context, spec = draft_blobs(parts)
        header = {**json.loads(fit), name: value}
        return with_blobs(parts, [json.dumps(header).encode(), context, spec]).seal()

    return change


def other_spec(parts: Parts) -> bytes:
    fit, context, spec = draft_blobs(parts)
    return with_blobs(parts, [fit, context, spec + b"\0"]).seal()


def no_fit(parts: Parts) -> bytes:
    _, context, spec = draft_blobs(parts)
    return with_blobs(parts, [b"no JSON", context, spec]).seal()


def without_draft(parts: Parts) -> bytes:
    return replace(parts, sections=tuple(s for s in parts.sections if s[0] != Kind.DRAFT)).seal()


def flipped_draft(parts: Parts) -> bytes:
    """One bit, and no new checksum."""
    data = bytearray(parts.seal())
    before = sum(len(section) for kind, section in parts.sections if kind < Kind.DRAFT)
    data[before + 1000] ^= 4
    return bytes(data)


def shifted_cells(parts: Parts) -> bytes:
    """A state of the right size that stands for other positions; llama itself would take it."""
    fit, context, spec = draft_blobs(parts)
    return with_blobs(parts, [fit, context[:16] + struct.pack("<i", 5) + context[20:], spec]).seal()


DRAFTS: list[tuple[Callable[[Parts], bytes], str]] = [
    (fit_field("model", "0" * 32), "draft model"),
    (fit_field("kind", "draft-mtp"), "kind of drafter"),
    (fit_field("type_k", "q8_0"), "type_k"),
    (fit_field("type_v", "q8_0"), "type_v"),
    (fit_field("v_transposed", True), "v_transposed"),
    (fit_field("rope", "other"), "rope"),
    (fit_field("n_tokens", 5000), "position"),
    (fit_field("base", 1), "position"),
    (fit_field("n_tokens", "many"), "positions"),
    (fit_field("version", 99), "version"),
    (other_spec, "speculative state size"),
    (no_fit, "JSON"),
    (without_draft, "no draft block"),
    (flipped_draft, "checksum"),
    (shifted_cells, "positions"),
]


@pytest.mark.parametrize(("change", "reason"), DRAFTS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_draft_that_does_not_fit_is_left_out_alone(
    double: Served, slot_dir: Path, scene: Scene, change: Callable[[Parts], bytes], reason: str
) -> None:
    (slot_dir / "other.bin").write_bytes(change(scene.parts))
    restored = double.restore(0, "other.bin")
    n = len(scene.first.history)
    assert (restored["n_restored"], restored["n_reusable"]) == (n, n)
    draft = restored["draft"]
    assert (draft["restored"], draft["n_tokens"]) == (False, 0)
    assert reason in draft["reason"].replace(" k:", "_k:").replace("type v", "type_v").replace("v tr", "v_tr")
    again = double.ask(scene.live.prompt, N, 0, ignore_eos=True)
    assert again.timings["cache_n"] == n
    assert again.text == scene.live.text
    # the drafter reads the text itself, in other batches than before, and drafts well again
    assert again.timings["draft_prompt_n"] >= n
    assert again.acceptance >= 0.7


def test_nothing_of_the_old_slot_s_draft_survives(double: Served, slot_dir: Path, scene: Scene) -> None:
    (slot_dir / "other.bin").write_bytes(without_draft(scene.parts))
    double.ask(prompt_of(double, 300, skip=20), N, 0, ignore_eos=True)
    double.restore(0, "other.bin")
    again = double.ask(scene.live.prompt, N, 0, ignore_eos=True)
    assert again.timings["draft_prompt_n"] >= len(scene.first.history)
    assert again.acceptance >= 0.7


def test_a_draft_context_that_is_too_small_costs_the_draft_only(start_server: Start, tmp_path: Path) -> None:
    old = start_server(flags("self", slot_dir=tmp_path))
    first = old.ask(prompt_of(old, 1000), 4, 0, ignore_eos=True)
    old.save(0, "long.bin")
    live = old.ask([*first.prompt, *first.tokens, 5], N, 0, ignore_eos=True)
    old.stop()
    new = start_server(flags("self", "-cd", "512", slot_dir=tmp_path))
    restored = new.restore(0, "long.bin")
    assert restored["draft"]["restored"] is False
    assert "draft context too small" in restored["draft"]["reason"]
    assert "1003" in restored["draft"]["reason"]
    assert "512" in restored["draft"]["reason"]
    again = new.ask(live.prompt, N, 0, ignore_eos=True)
    assert again.timings["cache_n"] == 1003
    assert again.text == live.text
    short = new.ask(prompt_of(new, 50, skip=9), N, 0, ignore_eos=True)
    assert short.timings["draft_n"] > 0
    new.stop()


# -- the target


def setting(name: str, value: object) -> Callable[[Parts], bytes]:
    def change(parts: Parts) -> bytes:
        facts = parts.facts
        return replace(parts, facts=replace(facts, settings={**facts.settings, name: value})).seal()  # type: ignore[dict-item]

    return change


def other_weights(parts: Parts) -> bytes:
    target = replace(parts.facts.target, digest="0" * 32)
    return replace(parts, facts=replace(parts.facts, target=target)).seal()


def with_tokens(change: Callable[[list[int]], list[int]]) -> Callable[[Parts], bytes]:
    def changed(parts: Parts) -> bytes:
        words = parts.section(Kind.TOKENS)
        assert words is not None
        tokens = change(list(struct.unpack_from(f"<{(len(words) - 28) // 4}i", words, 24)))
        head = PAYLOAD_HEAD.pack(b"qsgg", 3, len(tokens) + 4) + struct.pack("<iII", -1, 1, len(tokens))
        section = head + struct.pack(f"<{len(tokens) + 1}i", *tokens, 0)
        return replace(
            parts.with_section(Kind.TOKENS, section), facts=replace(parts.facts, n_tokens=len(tokens))
        ).seal()

    return changed


def target_word(at: int, value: int) -> Callable[[Parts], bytes]:
    def change(parts: Parts) -> bytes:
        state = parts.section(Kind.TARGET)
        assert state is not None
        return parts.with_section(Kind.TARGET, state[:at] + struct.pack("<I", value) + state[at + 4 :]).seal()

    return change


def not_a_number(parts: Parts) -> bytes:
    state = parts.section(Kind.TARGET)
    assert state is not None
    at = len(state) // 2 & ~1
    return parts.with_section(Kind.TARGET, state[:at] + b"\x00\x7e" + state[at + 2 :]).seal()


def flipped_target(parts: Parts) -> bytes:
    data = bytearray(parts.seal())
    data[3000] ^= 1
    return bytes(data)


def cut_target(parts: Parts) -> bytes:
    state = parts.section(Kind.TARGET)
    assert state is not None
    return parts.with_section(Kind.TARGET, state[:-2]).seal()


def no_target(parts: Parts) -> bytes:
    return parts.with_section(Kind.TARGET, b"").seal()


N_CELLS = 90 + N - 1
TARGETS: list[tuple[Callable[[Parts], bytes], str, tuple[str, ...]]] = [
    (setting("type_k", "q8_0"), "type_k", ("q8_0", "f16")),
    (setting("type_v", "q8_0"), "type_v", ("q8_0", "f16")),
    (setting("v_transposed", True), "v_transposed", ("True", "False")),
    (setting("rope", "yarn"), "rope", ("yarn", "model")),
    (other_weights, "model", ("0" * 32,)),
    (with_tokens(lambda tokens: tokens * 30), "n_ctx", ("2048", str(30 * N_CELLS))),
    (with_tokens(lambda tokens: [1 << 30, *tokens[1:]]), "tokens", (str(1 << 30),)),
    (with_tokens(lambda tokens: tokens[:-1]), "target", (str(N_CELLS), str(N_CELLS - 1))),
    (target_word(0, 7), "target", ("streams",)),
    (target_word(4, 0xFFFFFFFF), "target", ("cells",)),
    (target_word(8, 0x7FFFFFFF), "target", ("positions",)),
    (target_word(8 + 12 * N_CELLS + 4, 3), "target", ()),
    (target_word(8 + 12 * N_CELLS + 8, 8), "target", ("type 8",)),
    (not_a_number, "target", ("finite",)),
    (cut_target, "target", ()),
    (no_target, "target", ()),
    (flipped_target, "target", ("checksum",)),
]


@pytest.mark.parametrize(
    ("change", "field", "words"), TARGETS, ids=[f"{i}-{t[1]}" for i, t in enumerate(TARGETS)]
)
def test_a_target_that_does_not_fit_is_refused_and_the_slot_is_unchanged(
    double: Served,
    slot_dir: Path,
    scene: Scene,
    change: Callable[[Parts], bytes],
    field: str,
    words: tuple[str, ...],
) -> None:
    held = double.ask(prompt_of(double, 40, skip=30), 6, 0, ignore_eos=True)
    (slot_dir / "other.bin").write_bytes(change(scene.parts))
    error = refused(double, 0, "restore", "other.bin", 400)
    assert (error["slot"], error["field"]) == ("unchanged", field)
    for word in words:
        assert word in error["message"]
    if field in ("type_k", "type_v", "v_transposed", "rope", "model", "n_ctx"):
        assert error["expected"] != error["found"]
    assert_unchanged(double, 0, held)


def test_only_what_llama_itself_refuses_empties_the_slot(
    double: Served, slot_dir: Path, scene: Scene
) -> None:
    """Rows of another size, which nobody knows before llama looks at them."""
    state = scene.parts.section(Kind.TARGET)
    assert state is not None
    at = 8 + 12 * N_CELLS + 8 + 4
    (row,) = struct.unpack_from("<Q", state, at)
    # as many layers with rows half as wide, and as much data: nothing is left over
    halved = bytearray(state[: at - 4])
    (n_layers,) = struct.unpack_from("<I", state, at - 8)
    for _ in range(2 * n_layers):
        halved += struct.pack("<iQ", 1, row // 2) + bytes(N_CELLS * row // 2)
    (slot_dir / "other.bin").write_bytes(scene.parts.with_section(Kind.TARGET, bytes(halved)).seal())
    double.ask(prompt_of(double, 40, skip=30), 6, 0, ignore_eos=True)
    error = refused(double, 0, "restore", "other.bin", 400)
    assert (error["slot"], error["field"]) == ("empty", "target")
    slot = double.get("/slots")[0]
    assert (slot["n_tokens"], slot["checkpoints"]) == (0, [])
    again = double.ask(scene.first.prompt, N, 0, ignore_eos=True)
    assert again.timings["cache_n"] == 0
    assert again.tokens == scene.first.tokens


def test_a_quantised_cache_comes_back_exactly_and_fits_no_other_type(
    start_server: Start, tmp_path: Path
) -> None:
    argv = flags("self", "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", slot_dir=tmp_path)
    small = start_server(argv)
    prompt = prompt_of(small, 1000)
    first = small.ask(prompt, 1, 0, ignore_eos=True)
    saved = small.save(0, "q8.bin")
    live = small.ask([*first.prompt, *first.tokens], 64, 0, ignore_eos=True)
    small.stop()
    wide = start_server(flags("self", slot_dir=tmp_path))
    wide.ask(prompt, 1, 0, ignore_eos=True)
    f16 = wide.save(0, "f16.bin")
    meta = 12 * 1000
    assert 0.50 <= (saved["target"]["bytes"] - meta) / (f16["target"]["bytes"] - meta) <= 0.56
    error = refused(wide, 0, "restore", "q8.bin", 400)
    assert (error["field"], error["slot"], error["found"], error["expected"]) == (
        "type_k",
        "unchanged",
        "q8_0",
        "f16",
    )
    assert wide.ask([*prompt, 5], 1, 0).timings["cache_n"] == 1000
    wide.stop()
    again = start_server(argv)
    again.restore(0, "q8.bin")
    answer = again.ask(live.prompt, 64, 0, ignore_eos=True)
    assert answer.timings["cache_n"] == 1000
    assert answer.text == live.text
    again.stop()


def test_memory_that_needs_no_checkpoints_says_so(double: Served, slot_dir: Path, scene: Scene) -> None:
    record = struct.pack("<qii", 50, 0, 49) + struct.pack("<Q", 3) + b"abc" + bytes(16)
    head = struct.pack("<4sII", b"SCKP", 1, 1)
    sections = list(scene.parts.sections)
    sections.insert(2, (int(Kind.CHECKPOINTS), head))
    (slot_dir / "other.bin").write_bytes(
        replace(scene.parts, sections=tuple(sections), records=(record,)).seal()
    )
    restored = double.restore(0, "other.bin")
    assert (restored["n_ckpt_restored"], restored["n_ckpt_dropped"]) == (0, 1)
    assert restored["notes"] == ["1 checkpoints left out: this model's memory needs none"]
    assert restored["draft"]["restored"] is True
