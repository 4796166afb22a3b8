"""Drafting never changes the distribution of the text: every rule, against plain sampling, on toy models.

Twice: with every branch followed, where the difference must be nothing but rounding, and with texts that the
samplers draw by their own numbers. Rules that are wrong on purpose show that both would notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from draft.base import Distribution
from spec_server.engine import verify
from tests.engine import toy

RULES = {"token": verify.accept_tokens, "block": verify.accept_block}
DRAFTERS = ("same", "near", "far", "hostile", "certain", "fickle")
EACH = list(product(toy.CHAINS, DRAFTERS))


def toys(chain_name: str, drafter: str) -> tuple[toy.Model, toy.Drafter]:
    chain = toy.CHAINS[chain_name]
    target = toy.model(1, chain)
    return target, toy.drafters(target, chain)[drafter]


# -- every branch


@pytest.mark.parametrize(("chain", "drafter"), EACH)
@pytest.mark.parametrize("rule", RULES)
def test_texts_of_three_tokens_have_exactly_the_targets_probabilities(
    rule: str, chain: str, drafter: str
) -> None:
    target, draft = toys(chain, drafter)
    spoken = toy.exact(RULES[rule], target, draft, n_max=2, n_tokens=3)
    assert toy.distance(spoken, toy.text_probabilities(target, 3)) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_reaches_past_the_text_changes_nothing_either(rule: str) -> None:
    target, draft = toys("all", "near")
    spoken = toy.exact(RULES[rule], target, draft, n_max=3, n_tokens=2)
    assert toy.distance(spoken, toy.text_probabilities(target, 2)) < 1e-12


def expected_accepted(rule: str, target: toy.Model, draft: toy.Drafter, n_max: int) -> float:
    return sum(
        weight * p * (len(tokens) - 1)
        for weight, drafted, proposals in toy.drafts(draft, (), n_max)
        for tokens, p in toy.round_outcomes(RULES[rule], target, (), drafted, proposals).items()
    )


@pytest.mark.parametrize(("chain", "drafter"), EACH)
def test_a_block_accepts_at_least_what_its_tokens_one_by_one_do(chain: str, drafter: str) -> None:
    target, draft = toys(chain, drafter)
    by_token = expected_accepted("token", target, draft, 3)
    assert expected_accepted("block", target, draft, 3) >= by_token - 1e-12


def test_the_papers_example_accepts_eleven_ninths() -> None:
    # Two tokens, two models that look at no context: sections 1 and 2 of Sun et al. give 10/9 and 11/9.
    target = lambda text: (np.array([0, 1]), np.array([1 / 3, 2 / 3]))  # noqa: E731
    draft = lambda text: (np.array([0, 1]), np.array([2 / 3, 1 / 3]))  # noqa: E731
    assert expected_accepted("token", target, draft, 2) == pytest.approx(10 / 9)
    assert expected_accepted("block", target, draft, 2) == pytest.approx(11 / 9)


# -- rules that are wrong on purpose


def accept_whatever(
    target: verify.Target, drafted: Sequence[int], proposals: Sequence[Distribution], uniform: verify.Uniform
) -> list[int]:
    return [*drafted, verify.draw(target(len(drafted)), uniform(len(drafted)))]


def recover_from_target(
    target: verify.Target, drafted: Sequence[int], proposals: Sequence[Distribution], uniform: verify.Uniform
) -> list[int]:
    """Forgets to take the proposal off what a rejected token is replaced from."""
    k = len(drafted)
    for i, token in enumerate(drafted):
        p, q = verify.probability(target(i), token), verify.probability(proposals[i], token)
        if uniform(i) * q >= p:
            return [*drafted[:i], verify.draw(target(i), uniform(k))]
    return [*drafted, verify.draw(target(k), uniform(k))]


def judge_by_another_proposal(
    target: verify.Target, drafted: Sequence[int], proposals: Sequence[Distribution], uniform: verify.Uniform
) -> list[int]:
    """Takes q before the temperature where the draft was drawn after it."""
    warmer = [(ids, np.sqrt(probs) / np.sqrt(probs).sum()) for ids, probs in proposals]
    return verify.accept_tokens(target, drafted, warmer, uniform)


def forget_the_weight(
    target: verify.Target, drafted: Sequence[int], proposals: Sequence[Distribution], uniform: verify.Uniform
) -> list[int]:
    """Block verification with the residual of the token by token rule."""
    k = len(drafted)
    _, chances = verify.block_chances(target, drafted, proposals)
    n = next((n for n in range(len(chances), 0, -1) if uniform(n - 1) < chances[n - 1]), 0)
    rest = target(k) if n == k else verify.residual(target(n), proposals[n])
    return [*drafted[:n], verify.draw(rest, uniform(k))]


WRONG = [accept_whatever, recover_from_target, judge_by_another_proposal, forget_the_weight]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_is_found_out_by_its_branches(wrong: toy.Accept) -> None:
    target, draft = toys("min_p", "near")
    spoken = toy.exact(wrong, target, draft, n_max=2, n_tokens=3)
    assert sum(spoken.values()) == pytest.approx(1.0)
    assert toy.distance(spoken, toy.text_probabilities(target, 3)) > 0.01


def test_a_draft_that_is_dropped_for_what_is_in_it_bends_the_text() -> None:
    # Why Draft says that a drawn token is never dropped.
    target, draft = toys("penalties", "near")

    def accept(
        rows: verify.Target, drafted: list[int], proposals: list[Distribution], u: verify.Uniform
    ) -> list[int]:
        n = drafted.index(0) if 0 in drafted else len(drafted)
        return verify.accept_tokens(rows, drafted[:n], proposals[:n], u)

    spoken = toy.exact(accept, target, draft, n_max=2, n_tokens=3)
    assert toy.distance(spoken, toy.text_probabilities(target, 3)) > 1e-3


# -- texts that are drawn


def sampler(rule: str, seed: int) -> verify.Any:
    if rule in RULES:
        return toy.accept_sampler(seed, RULES[rule])
    return toy.match_sampler(seed, is_coupled=rule == "coupled")


def drawn(rule: str, chain: str, drafter: str, n_texts: int) -> toy.Fit:
    target, draft = toys(chain, drafter)
    counts = toy.simulate(
        lambda seed: sampler(rule, seed), target, draft, n_max=3, n_tokens=3, n_texts=n_texts
    )
    return toy.fit(counts, toy.text_probabilities(target, 3))


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "exact-match"])
@pytest.mark.parametrize(("chain", "drafter"), [("all", "near"), ("penalties", "far"), ("cold", "hostile")])
def test_drawn_texts_have_the_targets_distribution(rule: str, chain: str, drafter: str) -> None:
    fit = drawn(rule, chain, drafter, 2500)
    assert fit.is_good, fit


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block", "coupled", "exact-match"])
@pytest.mark.parametrize(("chain", "drafter"), list(product(toy.CHAINS, ("near", "hostile"))))
def test_many_drawn_texts_have_the_targets_distribution(rule: str, chain: str, drafter: str) -> None:
    fit = drawn(rule, chain, drafter, 8000)
    assert fit.is_good, fit


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_is_found_out_by_its_texts(wrong: toy.Accept) -> None:
    target, draft = toys("min_p", "near")
    counts = toy.simulate(
        lambda seed: toy.accept_sampler(seed, wrong), target, draft, n_max=3, n_tokens=3, n_texts=8000
    )
    fit = toy.fit(counts, toy.text_probabilities(target, 3))
    assert not fit.is_good, fit


# -- the coupling


@pytest.mark.parametrize("chain", toy.CHAINS)
def test_a_seeds_text_depends_on_no_draft(chain: str) -> None:
    target = toy.model(1, toy.CHAINS[chain])
    for seed in range(40):
        plain, _, _ = toy.speak(toy.match_sampler(seed, is_coupled=True), target, target, 0, 8)
        for draft in toy.drafters(target, toy.CHAINS[chain]).values():
            for n_max in (1, 3):
                for is_coupled in (True, False):
                    sampler = toy.match_sampler(seed, is_coupled=is_coupled)
                    assert toy.speak(sampler, target, draft, n_max, 8)[0] == plain


def test_the_same_model_is_accepted_whole() -> None:
    target = toy.model(1, toy.CHAINS["all"])
    for rule in ("token", "block", "coupled"):
        for seed in range(50):
            _, n_drafted, n_accepted = toy.speak(sampler(rule, seed), target, target, 3, 8)
            assert n_accepted == n_drafted > 0


def test_accepting_beats_coupling_and_coupling_beats_matching() -> None:
    target, draft = toys("all", "near")
    rates = {}
    for rule in ("exact-match", "coupled", "token", "block"):
        runs = [toy.speak(sampler(rule, seed), target, draft, 3, 12) for seed in range(300)]
        rates[rule] = sum(r[2] for r in runs) / sum(r[1] for r in runs)
    assert rates["exact-match"] < rates["coupled"] < rates["token"] < rates["block"]
