"""Where nothing is found for long the drafters are left alone for some steps: nothing is lost by it."""

from __future__ import annotations

import pytest

from draft.base import DraftRequest
from draft.calibration import Calibration
from draft.length import DraftLength
from draft.quiet import QuietSteps
from draft.window import LengthPolicy
from spec_server.engine.base import SpeculativeParams
from spec_server.engine.core import EngineCore
from tests.draft.setups import FULL_CHAIN, MOD, MTP, SIMPLE, Kind, drafting, prompts, repeating
from tests.engine.harness import WINDOW, request, run
from tests.engine.test_adaptive import FakeCosts, machine, ruled

MODEL = Kind(("draft-simple",), WINDOW, WINDOW)
CHAIN = Kind(("ngram-simple", "draft-simple"), WINDOW, WINDOW)
KINDS = (SIMPLE, MOD, MODEL, CHAIN)


class Settled(FakeCosts):
    """Any step tells what its size takes."""

    def has_settled_at(self, n_tokens: int) -> bool:
        return True


class NeverQuiet(QuietSteps):
    """Everybody is asked before every step."""

    def in_vain(self) -> int:
        return 0


def policy_of(marginal: float, quiet: QuietSteps | None = None) -> LengthPolicy:
    policy = machine(marginal)
    policy.pace.costs = Settled(marginal)
    policy.quiet = quiet or QuietSteps()
    return policy


def count_shown(core: EngineCore) -> list[int]:
    """Grows by one with every batch that the drafter is shown."""
    shown: list[int] = []
    process = core.drafter.process
    core.drafter.process = lambda batch: (shown.append(batch.n_tokens), process(batch))  # type: ignore
    return shown


@pytest.mark.parametrize("kind", [*KINDS, MTP], ids=lambda kind: kind.id)
@pytest.mark.parametrize("n_slots", [1, 2])
def test_drafters_that_can_are_left_alone_and_the_text_is_the_same(kind: Kind, n_slots: int) -> None:
    asked = [request(p, 160 - 50 * i) for i, p in enumerate(prompts(kind, n_slots))]
    with drafting(Kind(("none",), kind.path), n_slots=n_slots) as core:
        plain = [done.text for done in run(core, *asked)]
    policy = policy_of(1.0)
    with drafting(ruled(kind, policy), n_slots=n_slots) as core:
        core.speculation.policy = policy
        shown = count_shown(core)
        done = run(core, *asked)
        n_steps = core.stats.n_steps
    assert [d.text for d in done] == plain
    if kind is MTP:
        assert len(shown) == n_steps  # what it needs of a step is gone with the next one
    else:
        assert len(shown) < 0.7 * n_steps


@pytest.mark.parametrize("kind", [SIMPLE, CHAIN], ids=lambda kind: kind.id)
def test_a_step_without_a_draft_is_shown_to_nobody_though_everybody_was_asked(kind: Kind) -> None:
    policy = policy_of(1.0, NeverQuiet())
    with drafting(ruled(kind, policy)) as core:
        core.speculation.policy = policy
        shown = count_shown(core)
        run(core, request(prompts(kind, 1)[0], 60))
        assert len(shown) < 0.5 * core.stats.n_steps
        assert core.drafter.n_tokens(0) == len(core.slots[0].tokens)


@pytest.mark.parametrize("stands", [True, False])
def test_only_a_draft_of_which_something_stood_has_everybody_asked_again(stands: bool) -> None:
    policy = policy_of(0.02, QuietSteps(_n_in_vain=100))
    length = DraftLength(policy, {"x": Calibration()}, 0)
    policy.quiet.step(1)
    policy.quiet.in_vain()
    length.stood(int(stands))
    assert (policy.quiet.in_vain() > 0) is not stands


@pytest.mark.parametrize("kind", [SIMPLE, MOD, CHAIN], ids=lambda kind: kind.id)
def test_a_text_that_begins_to_repeat_itself_is_found_a_few_steps_later(kind: Kind) -> None:
    accepted = []
    for quiet in (NeverQuiet(), QuietSteps(_n_in_vain=1000)):
        policy = policy_of(0.02, quiet)
        with drafting(ruled(kind, policy)) as core:
            core.speculation.policy = policy
            accepted.append(run(core, request(repeating(kind, 6), 96))[0].timings.draft_n_accepted)
    assert accepted[0] > 40
    assert accepted[1] >= accepted[0] - 8


@pytest.mark.parametrize("kind", [*KINDS, FULL_CHAIN], ids=lambda kind: kind.id)
def test_what_is_drafted_after_quiet_steps_is_what_would_have_been_without(kind: Kind) -> None:
    drafts, quiet_steps = [], []
    for quiet in (NeverQuiet(), QuietSteps(_n_in_vain=1000)):
        policy = policy_of(1.0, quiet)
        with drafting(ruled(kind, policy)) as core:
            core.speculation.policy = policy
            if isinstance(quiet, NeverQuiet):
                core.drafter.may_skip = lambda seq_id, n_tokens: False  # type: ignore[method-assign]
            shown = count_shown(core)
            prompt = repeating(kind, 6)
            tokens = run(core, request(prompt, 30))[0].tokens
            quiet_steps.append(core.stats.n_steps - len(shown))
            text = core.slots[0].tokens.view().copy()
            core.drafter.settle(0, text)  # as a save does
            core.drafter.policy = None  # type: ignore[attr-defined]
            drafts.append(core.drafter.propose([DraftRequest(0, text, tokens[-1], 4)])[0].tokens)
            assert core.drafter.prompt_tokens(0) == 0
    assert quiet_steps[0] == 0 < quiet_steps[1]
    assert drafts[0] == drafts[1]
    assert drafts[0]


@pytest.mark.parametrize("kind", [SIMPLE, MOD, CHAIN], ids=lambda kind: kind.id)
@pytest.mark.parametrize(
    "wanted", [SpeculativeParams(), SpeculativeParams(type="none"), SpeculativeParams(n_max=0)], ids=str
)
def test_after_a_request_those_who_draft_from_text_have_read_all_of_it(
    kind: Kind, wanted: SpeculativeParams
) -> None:
    policy = policy_of(1.0, QuietSteps(_n_in_vain=1000))
    with drafting(ruled(kind, policy)) as core:
        core.speculation.policy = policy
        for n_tokens in (40, 41, 43, 47):
            run(core, request(prompts(kind, 1)[0], n_tokens, speculative=wanted))
            assert core.drafter.n_tokens(0) == len(core.slots[0].tokens)
