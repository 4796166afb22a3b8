"""One test per rule: what breaks it, and which error says so."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from persistence import errors
from persistence.errors import SlotFileError
from persistence.files import SystemFiles
from persistence.reader import SlotFile
from persistence.store import DEFAULT_OWNER, DirectoryStore
from persistence.vocabulary import NoVocabulary, read_vocabulary
from tests.persistence.build import (
    STATE_HEAD,
    attention_state,
    checkpoint,
    facts,
    full_file,
    save,
    stock_file,
)


def opening(data: bytes) -> Callable[[Path], object]:
    def run(directory: Path) -> object:
        (directory / "x.bin").write_bytes(data)
        return SlotFile.open(directory / "x.bin")

    return run


def resealed(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    """A file whose facts were changed by a wrong writer, with a right checksum."""

    def run(directory: Path) -> object:
        data = full_file(directory).read_bytes()
        start = len(data) - int.from_bytes(data[-32:-24], "little")
        head = bytearray(data[start : start + 32])
        (n_facts,) = struct.unpack_from("<I", head, 24)
        tables, text = data[start + 32 : -32 - n_facts], data[-32 - n_facts : -32]
        tree = json.loads(text)
        changed = change(tree)
        packed = changed if isinstance(changed, bytes) else json.dumps(tree).encode()
        struct.pack_into("<I", head, 24, len(packed))
        footer = bytes(head) + tables + packed
        footer += struct.pack("<Q", len(footer) + 32)
        return opening(data[:start] + footer + xxhash.xxh3_128_digest(footer) + b"DKEEPEND")(directory)

    return run


def damaged_target(directory: Path) -> object:
    path = full_file(directory)
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with SlotFile.open(path) as file:
        return file.read_target()


def shrunk_while_open(directory: Path) -> object:
    path = full_file(directory)
    with SlotFile.open(path) as file:
        os.truncate(path, 50)
        return file.read_target()


def failing_disk(directory: Path) -> object:
    class Failing(SystemFiles):
        def read(self, fd: int, out: memoryview, offset: int) -> int:
            raise OSError(5, "Input/output error")

    return SlotFile.open(full_file(directory), Failing())


def linked(directory: Path) -> object:
    (directory / "link.bin").symlink_to(full_file(directory))
    return SlotFile.open(directory / "link.bin")


def saving(**changes: object) -> Callable[[Path], object]:
    return lambda directory: save(DirectoryStore(directory), "x.bin", **changes)  # type: ignore[arg-type]


class Refusing(SystemFiles):
    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, fd: int, data: object) -> int:
        raise OSError(self.number, os.strerror(self.number))


def saving_to(files: SystemFiles) -> Callable[[Path], object]:
    return lambda directory: save(DirectoryStore(directory, files), "x.bin")


def vocabulary(directory: Path) -> object:
    return read_vocabulary(full_file(directory))


def behind_unknown_section(directory: Path) -> object:
    data = bytearray((Path(__file__).parents[1] / "golden" / "v1-unknown-section.bin").read_bytes())
    data[-1] ^= 1
    return opening(bytes(data))(directory)


def behind_odd_state(directory: Path) -> object:
    data = full_file(directory, b"opaque").read_bytes()
    return opening(data[:-1])(directory)


def other_number_of_words(directory: Path) -> object:
    """A writer that miscounts, and seals what it wrote."""
    data = bytearray(full_file(directory).read_bytes())
    start = len(data) - int.from_bytes(data[-32:-24], "little")
    data[8] -= 1
    (length,) = struct.unpack_from("<Q", data, start + 32 + 16)
    data[start + 32 + 24 : start + 32 + 40] = xxhash.xxh3_128_digest(bytes(data[:length]))
    data[-24:-8] = xxhash.xxh3_128_digest(bytes(data[start:-24]))
    return opening(bytes(data))(directory)


def named_pipe(directory: Path) -> object:
    os.mkfifo(directory / "pipe")
    return SlotFile.open(directory / "pipe")


STOCK = stock_file([1, 2, 3], attention_state([3]))
BIG_SETTINGS = replace(facts(3), settings={"s": "x" * 4000})

RULES: dict[str, tuple[type[SlotFileError], str, Callable[[Path], object]]] = {
    "an empty file": (errors.NotASlotFile, "tokens", opening(b"")),
    "a GGUF": (errors.NotASlotFile, "tokens", opening(b"GGUF" + bytes(40))),
    "the old byte order": (errors.NotASlotFile, "tokens", opening(b"ggsq" + STOCK[4:])),
    "ggsq version 2": (errors.UnsupportedVersion, "tokens", opening(STOCK[:4] + b"\2" + STOCK[5:])),
    "seven bytes": (errors.Truncated, "tokens", opening(STOCK[:7])),
    "more words than bytes": (errors.Truncated, "tokens", opening(STOCK[:8] + b"\xff" * 4 + STOCK[12:])),
    "a file that shrinks while it is read": (errors.Truncated, "target", shrunk_while_open),
    "a packed list too short": (
        errors.TokensInvalid,
        "tokens",
        opening(stock_file([-1, 1], b"", packed=False)),
    ),
    "more tokens than words": (
        errors.TokensInvalid,
        "tokens",
        opening(stock_file([-1, 1, 9, 1, 2, 0], attention_state([3]), packed=False)),
    ),
    "as many tokens as a u32 can say": (
        errors.TokensInvalid,
        "tokens",
        opening(stock_file([-1, 1, -1, 1, 2, 0], attention_state([3]), packed=False)),
    ),
    "words after the list": (
        errors.TokensInvalid,
        "tokens",
        opening(stock_file([-1, 1, 1, 5, 0, 7], attention_state([3]), packed=False)),
    ),
    "a negative token, packed": (
        errors.TokensInvalid,
        "tokens",
        opening(stock_file([3, -2], attention_state([3]))),
    ),
    "a negative token, plain": (
        errors.TokensInvalid,
        "tokens",
        opening(stock_file([3, -1], attention_state([3]), packed=False)),
    ),
    "an image": (
        errors.UnsupportedContent,
        "tokens",
        opening(stock_file([-1, 1, 1, 5, 1, 0, 4, 0], attention_state([3]), packed=False)),
    ),
    "a stock state without its last byte": (errors.StateNotFramed, "target", opening(STOCK[:-1])),
    "half a footer": (errors.FooterDamaged, "footer", opening(STOCK + b"DKFOOT")),
    "a footer's magic alone": (errors.FooterDamaged, "footer", opening(STOCK + b"DKFOOTER" + bytes(90))),
    "a footer longer than the file": (
        errors.FooterDamaged,
        "footer",
        opening(STOCK + struct.pack("<Q", 4000) + bytes(16) + b"DKEEPEND"),
    ),
    "a damaged footer behind an unknown section": (errors.FooterDamaged, "footer", behind_unknown_section),
    "a damaged footer behind a state of unknown framing": (errors.FooterDamaged, "footer", behind_odd_state),
    "another number of words than the section has": (errors.SectionsInvalid, "tokens", other_number_of_words),
    "a named pipe": (errors.NotAFile, "", named_pipe),
    "an end magic alone": (errors.FooterDamaged, "footer", opening(STOCK + b"DKEEPEND")),
    "an end magic in a tiny file": (errors.FooterDamaged, "footer", opening(STOCK[:12] + b"DKEEPEND")),
    "a section that does not begin where the one before ends": (
        errors.SectionsInvalid,
        "target",
        lambda directory: opening(with_section_offset(full_file(directory).read_bytes()))(directory),
    ),
    "facts that are no JSON": (errors.FactsInvalid, "footer", resealed(lambda tree: b"{")),
    "facts that are no object": (errors.FactsInvalid, "footer", resealed(lambda tree: b"[]")),
    "facts nested too deep": (errors.FactsInvalid, "footer", resealed(lambda tree: b"[" * 3000)),
    "facts without a writer": (errors.FactsInvalid, "footer", resealed(lambda tree: tree.pop("writer"))),
    "a writer that is a number": (
        errors.FactsInvalid,
        "footer",
        resealed(lambda tree: tree.update(writer=1)),
    ),
    "a token count that is a boolean": (
        errors.FactsInvalid,
        "footer",
        resealed(lambda tree: tree.update(n_tokens=True)),
    ),
    "a setting that is a list": (
        errors.FactsInvalid,
        "footer",
        resealed(lambda tree: tree.update(settings={"a": [1]})),
    ),
    "settings that are a list": (
        errors.FactsInvalid,
        "footer",
        resealed(lambda tree: tree.update(settings=[])),
    ),
    "an identity without a digest": (
        errors.FactsInvalid,
        "footer",
        resealed(lambda tree: tree.update(target={"name": "x"})),
    ),
    "a digest that is a number": (
        errors.FactsInvalid,
        "footer",
        resealed(lambda tree: tree.update(draft={"name": "x", "digest": 7})),
    ),
    "a time that is a word": (
        errors.FactsInvalid,
        "footer",
        resealed(lambda tree: tree.update(created="now")),
    ),
    "another number of tokens": (
        errors.FactsInvalid,
        "footer",
        resealed(lambda tree: tree.update(n_tokens=99)),
    ),
    "a flipped bit in the state": (errors.ChecksumMismatch, "target", damaged_target),
    "facts beyond the footer's limit": (errors.FactsTooLarge, "footer", saving(file_facts=BIG_SETTINGS)),
    "too many checkpoints": (
        errors.TooManyCheckpoints,
        "checkpoints",
        saving(checkpoints=[checkpoint(1)] * 4097),
    ),
    "a name with a slash": (errors.InvalidName, "", lambda d: DirectoryStore(d).open(DEFAULT_OWNER, "a/b")),
    "a link": (errors.NotAFile, "", linked),
    "a directory": (errors.NotAFile, "", lambda directory: SlotFile.open(directory)),
    "a missing file": (errors.NotFound, "", lambda directory: SlotFile.open(directory / "none")),
    "a file used as a directory": (errors.NotFound, "", lambda d: SlotFile.open(full_file(d) / "x")),
    "no permission": (errors.Forbidden, "", saving_to(Refusing(13))),
    "a full disk": (errors.NoSpace, "", saving_to(Refusing(28))),
    "a disk that fails": (errors.StorageFailed, "", failing_disk),
    "a model without a vocabulary": (NoVocabulary, "", vocabulary),
}


def with_section_offset(data: bytes) -> bytes:
    out = bytearray(data)
    start = len(out) - int.from_bytes(out[-32:-24], "little")
    out[start + 32 + 40 + 8] ^= 1
    out[-24:-8] = xxhash.xxh3_128_digest(bytes(out[start:-24]))
    return bytes(out)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_has_its_error(tmp_path: Path, rule: str) -> None:
    error, section, run = RULES[rule]
    with pytest.raises(SlotFileError) as caught:
        run(tmp_path)
    assert type(caught.value) is error
    assert caught.value.section == section
    assert str(caught.value)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_every_error_has_a_rule_here() -> None:
    tested = {error for error, _, _ in RULES.values()}
    assert tested >= set(SlotFileError.__subclasses__())


@pytest.mark.parametrize(
    "misuse",
    [
        lambda w: w.commit(facts(0)),
        lambda w: w.draft(b"", b"", b""),
        lambda w: w.checkpoints(0, []),
        lambda w: (w.payload([1], STATE_HEAD), w.payload([1], STATE_HEAD)),
        lambda w: (w.payload([1], STATE_HEAD), w.draft(b"", b"", b""), w.draft(b"", b"", b"")),
        lambda w: (w.payload([1], STATE_HEAD), w.draft(b"", b"", b""), w.checkpoints(1, [checkpoint(1)])),
        lambda w: (w.payload([1], STATE_HEAD), w.checkpoints(2, [checkpoint(1)])),
        lambda w: (w.payload([1], STATE_HEAD), w.checkpoints(0, [checkpoint(1)] * 0), w.commit(facts(2))),
        lambda w: w.payload([-1], STATE_HEAD),
        lambda w: w.payload([2**31], STATE_HEAD),
        lambda w: w.payload(["1"], STATE_HEAD),
        lambda w: w.payload([1], b"short"),
        lambda w: (w.payload([1], STATE_HEAD), w.commit(replace(facts(1), settings={"a": float("nan")}))),
        lambda w: (w.payload([1], STATE_HEAD), w.commit(replace(facts(1), settings={"a": "\ud800"}))),
        lambda w: (w.payload([1], STATE_HEAD), w.commit(replace(facts(1), settings={"a": object()}))),
        lambda w: (w.payload([1], STATE_HEAD), w.commit(replace(facts(1), settings={"a": [1]}))),
        lambda w: (w.abort(), w.payload([1], STATE_HEAD)),
    ],
)
def test_misuse_of_the_writer_is_a_value_error_and_leaves_nothing(
    tmp_path: Path, misuse: Callable[[object], object]
) -> None:
    store = DirectoryStore(tmp_path)
    writer = store.create(DEFAULT_OWNER, "x.bin")
    with pytest.raises(ValueError, match=r"."):
        misuse(writer)
    assert os.listdir(tmp_path) == []
    save(store, "x.bin")


@pytest.mark.parametrize("what", ["a link", "a directory", "a named pipe"])
def test_what_is_no_file_is_called_so(what: str, tmp_path: Path) -> None:
    _, _, act = RULES[what]
    with pytest.raises(errors.NotAFile, match="not a regular file"):
        act(tmp_path)
