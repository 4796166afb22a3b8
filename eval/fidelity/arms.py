"""The ways to draft that are compared, the samplings, and the servers for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eval import models
from eval.client import Client
from eval.server import ServerProcess

WINDOW = models.REPOSITORY / "tests" / "models" / "tiny-gemma3-swa.gguf"
_NGRAM = ("--spec-ngram-simple-size-n", "1", "--spec-ngram-simple-size-m", "4")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to draft. `seeded`: each request names a seed."""

    name: str
    flags: tuple[str, ...]
    seeded: bool = False


PLAIN = Arm("plain", ("--spec-type", "none"))
_MTP = ("--spec-type", "draft-mtp")
ARMS = (
    Arm("plain, other seeds", PLAIN.flags, seeded=True),
    Arm("draft-mtp, block", _MTP),
    Arm("draft-mtp, token", (*_MTP, "--spec-verify", "token")),
    Arm("draft-mtp, exact-match", (*_MTP, "--spec-verify", "exact-match")),
    Arm("draft-mtp, seeds", _MTP, seeded=True),
    Arm("good draft model", ("--spec-type", "draft-simple", "-md", str(models.MTP_TARGET))),
    Arm("bad draft model", ("--spec-type", "draft-simple", "-md", str(WINDOW))),
    Arm("ngram-simple", ("--spec-type", "ngram-simple", *_NGRAM)),
    Arm("ngram-simple,draft-mtp", ("--spec-type", "ngram-simple,draft-mtp", *_NGRAM)),
)
SAMPLINGS: Mapping[str, Mapping[str, object]] = {
    "0.3": {"temperature": 0.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "0.8, top_k, top_p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.0},
    "1.0, min_p": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
    "1.5, top_k": {"temperature": 1.5, "top_k": 3, "top_p": 1.0, "min_p": 0.0},
    "1.2, penalties": {
        "temperature": 1.2,
        "top_k": 6,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "repeat_penalty": 1.2,
    },
}


def named(names: Sequence[str] | None) -> list[Arm]:
    known = {arm.name: arm for arm in ARMS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"no arm {name!r}; there are {'; '.join(known)}")
    return [known[name] for name in names] if names else list(ARMS)


@dataclass(frozen=True, slots=True)
class Servers:
    """Starts one after the other, so that each has the machine for itself."""

    command: list[str]
    more: tuple[str, ...]
    folder: Path

    @contextmanager
    def client(self, model: Path, arm: Arm) -> Iterator[Client]:
        argv = [*self.command, "-m", str(model), "-np", "1", "-c", "2048", "--spec-draft-n-max", "3"]
        argv += ["--spec-adaptive", "off", "--threads-adaptive", "off", *arm.flags, *self.more]
        log = self.folder / "server.log"
        with ServerProcess(argv, log_path=log) as process, Client(process.base_url) as client:
            yield client
