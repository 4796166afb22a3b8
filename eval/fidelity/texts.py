"""What servers say with and without drafts: sampled texts by distribution, greedy ones word for word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from eval import models
from eval.distributions import Comparison, compare
from eval.fidelity.arms import PLAIN, SAMPLINGS, Arm, Servers
from eval.workloads import prompts, tokens

N_TOKENS = 4  # of a sampled text: one behind the prompt, then a round with up to two drafted tokens
# What follows is open, where the tiny model is sure of most other texts; and some of it has been said before, so
# that an n-gram drafter has something to propose.
TEXT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nTell me a story.<|im_end|>\n"
    "<|im_start|>assistant\nOnce upon a time, in a small village, there was a little girl. The"
)
_MOST_PARTINGS = 0.2  # of greedy texts, by rounding; tests/e2e replays each and judges it


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


# -- distributions


def sample(servers: Servers, arms: Sequence[Arm], n: int, console: Console) -> list[Sampled]:
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


def _lots(servers: Servers, arm: Arm, n: int) -> _Texts:
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


def compare_greedy(
    servers: Servers, arms: Sequence[Arm], n_prompts: int, max_tokens: int, console: Console
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


def _answers(servers: Servers, model: Path, arm: Arm, n_prompts: int, max_tokens: int) -> _Texts:
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
