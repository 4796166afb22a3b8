"""The predicted rates are the tokens of a round over its time, worked out by hand."""

from __future__ import annotations

import pytest

from eval.rates import LONGEST, _Answer, predicted


def test_predicted_rates() -> None:
    costs = {f'llamacpp:spec_step_cost_ms{{tokens="{n}"}}': 4.0 + 4.0 * n for n in range(1, LONGEST + 2)}
    answers = [
        _Answer(100.0, draft_ms=16.0, draft_n=16, n_drafts=2, accepted_per_pos=(2, 1)),
        _Answer(100.0, draft_ms=16.0, draft_n=16, n_drafts=2, accepted_per_pos=(1,)),
    ]
    rates = predicted(costs, answers)
    assert len(rates) == LONGEST + 1
    assert rates[0] == pytest.approx(1000 / 8)
    assert rates[1] == pytest.approx(1000 * 1.75 / (12 + 1))  # 3 of 4 drafts stood at least one token long
    assert rates[2] == pytest.approx(1000 * 2.0 / (16 + 2))  # and 1 of 4 two
    assert rates[8] == pytest.approx(1000 * 2.0 / (40 + 8))
