"""The drafters that acceptance is measured for, as flags that both servers know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eval import models


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """`target` None: the standard one, which has no MTP head."""

    flags: Mapping[str, str] = field(default_factory=dict)
    needs_draft_model: bool = False
    target: Path | None = None


# Shorter matches and drafts than the default: chats repeat a few words, not pages.
_SIMPLE = {"--spec-ngram-simple-size-n": "3", "--spec-ngram-simple-size-m": "4"}
_MOD = {"--spec-ngram-mod-n-match": "3", "--spec-ngram-mod-n-min": "1", "--spec-ngram-mod-n-max": "4"}

DRAFTERS: Mapping[str, DrafterSetup] = {
    "draft-simple": DrafterSetup(needs_draft_model=True),
    "draft-mtp": DrafterSetup(target=models.MTP_TARGET),
    "ngram-simple": DrafterSetup(_SIMPLE),
    "ngram-mod": DrafterSetup(_MOD),
    "draft-mtp,ngram-mod": DrafterSetup(_MOD, target=models.MTP_TARGET),
}


def named(name: str) -> list[str]:
    """Names by commas are a chain, so "all" stands for all; ValueError where there is no such drafter."""
    if name == "all":
        return list(DRAFTERS)
    if name not in DRAFTERS:
        raise ValueError(f"no drafter {name!r} to measure; there are all, {', '.join(DRAFTERS)}")
    return [name]
