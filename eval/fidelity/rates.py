"""How many drafted tokens each acceptance rule lets stand where requests sample; standard models, paired prompts."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from rich.console import Console

from eval import models
from eval.fidelity.arms import Arm, Servers
from eval.workloads import prompts, tokens

TEMPERATURE = 0.8
_DRAFT = (
    "--spec-type",
    "draft-simple",
    "-md",
    str(models.DRAFTER),
    "--spec-draft-p-min",
    "0",
    "--spec-verify",
)
# The first is what the others are compared with.
RULES = (
    Arm("exact-match", (*_DRAFT, "exact-match")),
    Arm("token", (*_DRAFT, "token")),
    Arm("block", (*_DRAFT, "block")),
    Arm("seeds", (*_DRAFT, "block"), seeded=True),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """One rule's counts over all prompts. `gain` is its rate less that of exact match, as the mean over prompts, and
    `gain_error` half of that mean's 95 % interval."""

    rule: str
    n_prompts: int
    draft_n: int
    draft_n_accepted: int
    n_drafts: int
    gain: float
    gain_error: float

    @property
    def rate(self) -> float:
        return self.draft_n_accepted / self.draft_n

    @property
    def mean_length(self) -> float:
        """Tokens of a round with a draft, the target's own included."""
        return 1.0 + self.draft_n_accepted / self.n_drafts


def measure(servers: Servers, n_prompts: int, max_tokens: int, console: Console) -> list[Rates]:
    results: list[Rates] = []
    base: list[float] = []
    console.print(
        f"acceptance at temperature {TEMPERATURE}, {n_prompts} prompts, {max_tokens} tokens", highlight=False
    )
    for arm in RULES:
        counts = _counts(servers, arm, n_prompts, max_tokens)
        shares = [accepted / drafted if drafted else 0.0 for drafted, accepted, _ in counts]
        base = base or shares
        gains = [share - other for share, other in zip(shares, base, strict=True)]
        error = 1.96 * statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        drafted, accepted, drafts = (sum(column) for column in zip(*counts, strict=True))
        results.append(Rates(arm.name, len(counts), drafted, accepted, drafts, statistics.mean(gains), error))
        console.print(_line(results[-1]), highlight=False, soft_wrap=True)
    return results


def _line(r: Rates) -> str:
    share = f"accepted {r.draft_n_accepted:5} of {r.draft_n:5} ({r.rate:.3f})"
    gain = f"{100 * r.gain:+.1f} +- {100 * r.gain_error:.1f} points"
    return f"{r.rule:12} {share}  {r.mean_length:.3f} tokens a round  {gain}"


def _counts(servers: Servers, arm: Arm, n_prompts: int, max_tokens: int) -> list[tuple[int, int, int]]:
    """(drafted, accepted, drafts) of each prompt."""
    counts = []
    with servers.client(models.target(), arm) as client:
        for i, prompt in enumerate(prompts("chat")[:n_prompts]):
            options: dict[str, object] = {"temperature": TEMPERATURE, "cache_prompt": False}
            if arm.seeded:
                options["seed"] = i
            _, timings = client.sample(tokens(prompt, client), max_tokens=max_tokens, options=options)
            counts.append((timings["draft_n"], timings["draft_n_accepted"], timings["n_drafts"]))
    return counts
