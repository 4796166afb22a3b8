"""`python -m eval fidelity`: does drafting change what is said? By distribution, and at temperature 0 word
for word.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from eval import models
from eval.client import Client
from eval.distributions import Comparison, compare
from eval.server import ServerProcess
from eval.workloads import prompts, tokens

WINDOW = models.REPOSITORY / "tests" / "models" / "tiny-gemma3-swa.gguf"
N_TOKENS = 4  # of a sampled text: one behind the prompt, then a round with up to two drafted tokens
# What follows is open; the tiny model is sure of most other texts.
TEXT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nTell me a story.<|im_end|>\n"
    "<|im_start|>assistant\nOnce upon a time, there was a little"
)
_NGRAM = ("--spec-ngram-simple-size-n", "1", "--spec-ngram-simple-size-m", "4")
# Among all comparisons of a run one in a thousand runs may fail by chance.
_FALSE_ALARMS = 1e-3
_MOST_PARTINGS = 0.2  # of greedy texts, by rounding; tests/e2e replays each and judges it


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


@dataclass(frozen=True, slots=True)
class Sampled:
    """One arm at one sampling, against plain sampling."""

    arm: str
    sampling: str
    comparison: Comparison
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class Greedy:
    """One arm's texts at temperature 0, against those without drafts; `partings` are (prompt, token)."""

    model: str
    arm: str
    n_texts: int
    acceptance: float | None
    partings: tuple[tuple[int, int], ...]

    @property
    def is_good(self) -> bool:
        return len(self.partings) <= _MOST_PARTINGS * self.n_texts


@dataclass(slots=True)
class _Texts:
    """What one server said."""

    lots: dict[str, Counter[Hashable]] = field(default_factory=dict)  # by sampling
    answers: list[list[int]] = field(default_factory=list)
    acceptance: dict[str, float | None] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--server-bin", metavar="COMMAND", help="start this instead of our server")
    add("-n", "--n-texts", type=int, default=500, help="sampled texts of each lot; 0: none (default: 500)")
    add("--n-prompts", type=int, default=20, help="prompts for greedy texts; 0: none (default: 20)")
    add("--max-tokens", type=int, default=64, help="tokens of a greedy text (default: 64)")
    add("--arm", action="append", metavar="NAME", help=f"repeatable: {'; '.join(a.name for a in ARMS)}")
    add("--json", type=Path, metavar="FILE", help="write every number there")
    parser.epilog = (
        "What follows -- goes to the servers that are started. Exit status 1: drafting changes the text."
    )


def run(args: argparse.Namespace, server_args: Sequence[str], console: Console) -> int:
    arms = _named(args.arm)
    start = shlex.split(args.server_bin) if args.server_bin else [sys.executable, "-m", "spec_server"]
    sampled: list[Sampled] = []
    greedy: list[Greedy] = []
    with tempfile.TemporaryDirectory(prefix="eval-") as folder:
        servers = _Servers(start, tuple(server_args), Path(folder))
        if args.n_texts > 0:
            sampled = _sample(servers, arms, args.n_texts, console)
        if args.n_prompts > 0:
            greedy = _compare_greedy(servers, arms, args.n_prompts, args.max_tokens, console)
    worst = _FALSE_ALARMS / max(1, len(sampled))
    failed = [f"{s.arm} at {s.sampling}" for s in sampled if s.comparison.p_value < worst]
    failed += [f"{g.arm} on {g.model}" for g in greedy if not g.is_good]
    if args.json:
        facts = {
            "sampled": [asdict(s) for s in sampled],
            "greedy": [asdict(g) for g in greedy],
            "failed": failed,
        }
        args.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    for name in failed:
        console.print(f"drafting changes the text: {name}", highlight=False, markup=False, soft_wrap=True)
    return 1 if failed else 0


def _named(names: Sequence[str] | None) -> list[Arm]:
    known = {arm.name: arm for arm in ARMS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"no arm {name!r}; there are {'; '.join(known)}")
    return [known[name] for name in names] if names else list(ARMS)


@dataclass(frozen=True, slots=True)
class _Servers:
    """Starts one after the other, so that each has the machine for itself."""

    command: list[str]
    more: tuple[str, ...]
    folder: Path

    @contextmanager
    def client(self, model: Path, arm: Arm) -> Iterator[Client]:
        argv = [*self.command, "-m", str(model), "-np", "1", "-c", "2048", "--spec-draft-n-max", "3"]
        argv += ["--spec-adaptive", "off", *arm.flags, *self.more]
        log = self.folder / "server.log"
        with ServerProcess(argv, log_path=log) as process, Client(process.base_url) as client:
            yield client


# -- distributions


def _sample(servers: _Servers, arms: Sequence[Arm], n: int, console: Console) -> list[Sampled]:
    plain = _lots(servers, PLAIN, n)
    results = []
    console.print(f"{n} texts of {N_TOKENS} tokens each, against as many without drafts", highlight=False)
    for arm in arms:
        texts = _lots(servers, arm, n)
        for sampling in SAMPLINGS:
            found = compare(texts.lots[sampling], plain.lots[sampling])
            results.append(Sampled(arm.name, sampling, found, texts.acceptance[sampling]))
            console.print(_line(results[-1]), highlight=False, markup=False, soft_wrap=True)
    return results


def _line(s: Sampled) -> str:
    c = s.comparison
    rate = "     -" if s.acceptance is None else f"{s.acceptance:6.3f}"
    return (
        f"{s.arm:24} {s.sampling:17} accepted {rate}  chi-squared {c.chi_squared:7.1f} of {c.n_cells:3} cells, "
        f"p {c.p_value:.4f}  total variation {c.variation:.4f}, expected {c.expected_variation:.4f}"
    )


def _lots(servers: _Servers, arm: Arm, n: int) -> _Texts:
    texts = _Texts()
    with servers.client(models.MTP_TARGET, arm) as client:
        prompt = client.tokenize(TEXT)
        for name, sampling in SAMPLINGS.items():
            lot: Counter[Hashable] = Counter()
            drafted = accepted = 0
            for i in range(n):
                options = {**sampling, "seed": 10_000 + i} if arm.seeded else sampling
                said, timings = client.sample(prompt, max_tokens=N_TOKENS, options=options)
                lot[tuple(said)] += 1
                drafted += timings.get("draft_n", 0)
                accepted += timings.get("draft_n_accepted", 0)
            texts.lots[name] = lot
            texts.acceptance[name] = accepted / drafted if drafted else None
    return texts


# -- word for word


def _compare_greedy(
    servers: _Servers, arms: Sequence[Arm], n_prompts: int, max_tokens: int, console: Console
) -> list[Greedy]:
    """Every drafter once: what verifies sampled tokens has no say here."""
    real = Arm("draft-simple", ("--spec-type", "draft-simple", "-md", str(models.DRAFTER)))
    tiny = [arm for arm in arms if not arm.seeded and "--spec-verify" not in arm.flags]
    lots = [("tiny", models.MTP_TARGET, tiny)]
    lots.append(("SmolLM2", models.target(), [real, *(arm for arm in tiny if arm.name == "ngram-simple")]))
    results = []
    for name, model, drafters in lots:
        plain = _answers(servers, model, PLAIN, n_prompts, max_tokens)
        for arm in drafters:
            drafted = _answers(servers, model, arm, n_prompts, max_tokens)
            partings = tuple(
                (i, at)
                for i, (a, b) in enumerate(zip(plain.answers, drafted.answers, strict=True))
                if (at := _parting(a, b)) is not None
            )
            results.append(Greedy(name, arm.name, len(plain.answers), drafted.acceptance["greedy"], partings))
            console.print(_greedy_line(results[-1]), highlight=False, markup=False, soft_wrap=True)
    return results


def _greedy_line(g: Greedy) -> str:
    rate = "     -" if g.acceptance is None else f"{g.acceptance:6.3f}"
    equal = f"{g.n_texts - len(g.partings)} of {g.n_texts} greedy texts equal"
    where = "".join(f"; prompt {i} parts at token {at}" for i, at in g.partings)
    return f"{g.model:8} {g.arm:24} accepted {rate}  {equal}{where}"


def _answers(servers: _Servers, model: Path, arm: Arm, n_prompts: int, max_tokens: int) -> _Texts:
    texts = _Texts()
    drafted = accepted = 0
    with servers.client(model, arm) as client:
        for prompt in prompts("chat")[:n_prompts]:
            options = {"temperature": 0.0, "cache_prompt": False}
            said, timings = client.sample(tokens(prompt, client), max_tokens=max_tokens, options=options)
            texts.answers.append(said)
            drafted += timings.get("draft_n", 0)
            accepted += timings.get("draft_n_accepted", 0)
    texts.acceptance["greedy"] = accepted / drafted if drafted else None
    return texts


def _parting(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first token where two texts differ."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if at is None and len(a) != len(b) else at
