"""Model: refusals at load, vocabulary, identity."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from eval.models import target
from spec_server.runtime import gguf
from spec_server.runtime.errors import ModelError
from spec_server.runtime.model import Model
from tests.runtime.drive import DRAFT, HYBRID, WINDOWED

pytestmark = pytest.mark.model


def missing(folder: Path) -> Path:
    return folder / "none.gguf"


def a_folder(folder: Path) -> Path:
    return folder


def other_format(folder: Path) -> Path:
    path = folder / "text.gguf"
    path.write_bytes(b"PK\3\4" * 100)
    return path


def empty(folder: Path) -> Path:
    path = folder / "empty.gguf"
    path.touch()
    return path


def cut_in_header(folder: Path) -> Path:
    path = folder / "cut.gguf"
    path.write_bytes(WINDOWED.read_bytes()[:1000])
    return path


def cut_in_tensors(folder: Path) -> Path:
    path = folder / "short.gguf"
    path.write_bytes(WINDOWED.read_bytes()[:-1000])
    return path


def absurd_counts(folder: Path) -> Path:
    path = folder / "absurd.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I2q", 3, -1, 1) + b"\0" * 100)
    return path


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (missing, "No such file"),
        (a_folder, "Is a directory"),
        (other_format, "is not a GGUF file"),
        (empty, "is not a GGUF file"),
        (cut_in_header, "llama cannot load"),
        (cut_in_tensors, "llama cannot load .*not within the file bounds"),
        (absurd_counts, "llama cannot load .*number of tensors"),
    ],
)
def test_a_file_that_cannot_be_loaded(tmp_path: Path, make: object, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        Model(make(tmp_path))  # type: ignore[operator]


def test_facts(models: dict[str, Model]) -> None:
    full, hybrid, windowed = models["full"], models["hybrid"], models["windowed"]
    assert [m.arch for m in (full, hybrid, windowed)] == ["llama", "qwen35", "gemma3"]
    assert [m.n_vocab for m in (full, hybrid, windowed)] == [49152, 4096, 4096]
    assert [m.n_swa for m in (full, hybrid, windowed)] == [0, 0, 64]
    assert [m.is_hybrid for m in (full, hybrid, windowed)] == [False, True, False]
    assert [(m.n_nextn, m.has_mtp) for m in (full, hybrid)] == [(0, False), (1, True)]
    assert (full.n_embd, full.n_layer, full.n_ctx_train) == (256, 4, 8192)
    assert (full.bos_text, full.eos_text, full.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert full.eog == {0, 2, 4}
    assert full.is_eog(2)
    assert not full.is_eog(5)
    assert "im_start" in (full.chat_template() or "")
    assert full.meta("general.architecture") == "llama"
    assert full.meta("no.such.key") is None
    assert len(full.meta("tokenizer.chat_template") or "") > 256
    assert full.n_params > 15_000_000
    assert full.size > 10_000_000
    assert full.suppressed == ()


TEXTS = ["", "Hello world", "naïve „Ünïcode“ 漢字 🙂🏽", "a\0b", " \n\t ", "x" * 5000, "<|im_start|>user\n"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(models: dict[str, Model], text: str) -> None:
    model = models["full"]
    for parse_special in (True, False):
        tokens = model.tokenize(text, False, parse_special)
        assert model.detokenize(tokens, special=True).decode() == text
        assert tokens == model.tokenize(text.encode(), False, parse_special)


def test_special_tokens(models: dict[str, Model]) -> None:
    model = models["full"]
    assert model.tokenize("<|im_end|>", False, True) == [2]
    assert len(model.tokenize("<|im_end|>", False, False)) > 1
    assert (model.piece(2), model.piece(2, special=True)) == (b"", b"<|im_end|>")


def test_a_lone_surrogate_becomes_a_question_mark(models: dict[str, Model]) -> None:
    model = models["full"]
    assert model.detokenize(model.tokenize("a\ud800b", False)) == b"a?b"


@pytest.mark.parametrize("token", [-1, 49152])
def test_a_token_that_does_not_exist(models: dict[str, Model], token: int) -> None:
    with pytest.raises(IndexError):
        models["full"].piece(token)


def test_the_drafter_fits_its_target(models: dict[str, Model]) -> None:
    with Model(target(), vocab_only=True) as model:
        assert model.vocab_mismatch(models["full"]) is None


def test_vocabularies_of_other_size(models: dict[str, Model]) -> None:
    assert models["hybrid"].vocab_mismatch(models["windowed"]) is None
    assert "49152, draft 4096" in (models["full"].vocab_mismatch(models["hybrid"]) or "")


def patched(folder: Path, source: Path, old: bytes, new: bytes) -> Path:
    data = source.read_bytes()
    assert data.count(old) >= 1
    assert len(old) == len(new)
    path = folder / "patched.gguf"
    path.write_bytes(data.replace(old, new, 1))
    return path


def test_the_first_differing_token_is_named(tmp_path: Path, models: dict[str, Model]) -> None:
    one = struct.pack("<Q", 5) + "Ġthe".encode()
    other = struct.pack("<Q", 5) + "Ġthy".encode()
    path = patched(tmp_path, HYBRID, one, other)
    with Model(path, vocab_only=True) as draft:
        message = models["hybrid"].vocab_mismatch(draft) or ""
    assert message.startswith("token ")
    assert "target ' the', draft ' thy'" in message


@pytest.mark.parametrize("add", [b"tokenizer.ggml.add_bos_token", b"tokenizer.ggml.bos_token_id"])
def test_start_tokens_have_to_agree(tmp_path: Path, models: dict[str, Model], add: bytes) -> None:
    data = HYBRID.read_bytes()
    if add not in data:
        pytest.skip("the model does not say it")
    at = data.index(add) + len(add) + 4
    changed = bytearray(data)
    changed[at] ^= 1
    path = tmp_path / "bos.gguf"
    path.write_bytes(changed)
    with Model(path, vocab_only=True) as draft:
        message = models["hybrid"].vocab_mismatch(draft)
    # a start token that nobody adds may differ
    assert (message is not None) == (add == b"tokenizer.ggml.add_bos_token")


def test_an_identity_is_of_the_weights(tmp_path: Path, models: dict[str, Model]) -> None:
    name, digest = models["windowed"].identity()
    assert name == "tiny-gemma3-swa.gguf"
    assert len(bytes.fromhex(digest)) == 16
    copy = tmp_path / "another name.gguf"
    shutil.copy(WINDOWED, copy)
    with Model(copy) as model:
        assert model.identity() == ("another name.gguf", digest)
    assert models["hybrid"].identity()[1] != digest


@pytest.mark.parametrize("where", ["metadata", "first tensor", "last tensor", "end"])
def test_other_weights_have_another_identity(tmp_path: Path, where: str) -> None:
    data = bytearray(WINDOWED.read_bytes())
    with gguf._open(WINDOWED) as header:
        begin = gguf._data_offset(header)
        last = begin + gguf._tensor_offset(header, gguf._n_tensors(header) - 1)
    at = {"metadata": 40, "first tensor": begin, "last tensor": last, "end": len(data) - 1}[where]
    if where == "metadata":
        at = data.index(b"general.name") + 30 if b"general.name" in data else 40
    data[at] ^= 1
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    assert gguf.digest(path) != gguf.digest(WINDOWED)


@pytest.mark.parametrize(
    ("size", "samples"),
    [
        (0, [(0, 0)]),
        (12288, [(0, 12288)]),
        (12289, [(0, 4096), (4096, 4096), (8193, 4096)]),
        (1 << 20, [(0, 4096), (522240, 4096), (1044480, 4096)]),
    ],
)
def test_samples_of_a_tensor(size: int, samples: list[tuple[int, int]]) -> None:
    assert gguf._samples(size) == samples


def test_parts_of_a_split_model() -> None:
    assert gguf.parts(DRAFT) == [DRAFT]
    names = [path.name for path in gguf.parts(Path("/m/big-00002-of-00003.gguf"))]
    assert names == ["big-00001-of-00003.gguf", "big-00002-of-00003.gguf", "big-00003-of-00003.gguf"]
