"""Every metric that /metrics can give stands in docs/http-api.md."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from draft.pace import Pace
from draft.window import LengthPolicy
from spec_server.api.metrics import HELP, MORE_HELP, PER_POSITION, exposition
from spec_server.engine.base import Timings
from spec_server.engine.report import counters
from spec_server.engine.tally import Tally
from tests.engine.harness import HYBRID, ROOT, Setup, core_of

pytestmark = pytest.mark.model
PAGE = (ROOT / "docs" / "http-api.md").read_text()


def shown() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and labels of an engine to which most of what is counted has happened."""
    once = {"drafts": 1, "drafted": 1, "accepted": 1}
    with core_of(Setup(HYBRID, n_ctx=64)) as core:
        core.speculation.policy = LengthPolicy(Pace(draft_ms={"draft-mtp": 1.0}))
        core.stats.finish(
            Timings(0, 1, 1.0, 1, 1.0, 1, 1, accepted_per_pos=(1,), drafters={"draft-mtp": once})
        )
        tally = Tally(core.stats.events)
        tally.done("save", 1, 1.0)
        tally.done("restore", 1, 1.0)
        text = exposition(counters(core)).decode()
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].removeprefix("llamacpp:").partition("{")
            yield name, tuple(re.findall(r'(\w+)="', labels))


def counted_seldom() -> set[str]:
    """Names that stand in the engine's sources as they are."""
    sources = (ROOT / "spec_server" / "engine").glob("*.py")
    return {
        name for path in sources for name in re.findall(r"""["']([a-z][a-z_]*_total)\b""", path.read_text())
    }


def test_every_metric_is_documented() -> None:
    section = PAGE[PAGE.index("\n## Metrics\n") :]
    documented = dict(re.findall(r"`([a-z_]+)(\{[a-z,]+\})?`", section))
    names = dict(shown())
    assert len(names) > 30
    assert {*names, *counted_seldom()} - documented.keys() == set()
    for name, labels in names.items():
        assert documented[name] == ("{" + ",".join(labels) + "}" if labels else ""), name


def test_every_metric_says_what_it_is() -> None:
    names = {name for name, _ in shown()} | counted_seldom()
    assert names - {*HELP, *MORE_HELP, PER_POSITION} == set()
