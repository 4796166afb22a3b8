"""Do two lots of texts come from one distribution? Chi-squared and total variation; pure arithmetic, no
server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

_LEAST = 5.0  # expected counts below which a cell is merged with others


@dataclass(frozen=True, slots=True)
class Comparison:
    """`p_value`: how often two lots of one distribution would differ at least so much, by chi-squared.

    `expected_variation` is about what the total variation of two such lots is.
    """

    n_texts: int
    n_cells: int
    chi_squared: float
    p_value: float
    variation: float
    expected_variation: float


def compare(ours: Counter[Hashable], plain: Counter[Hashable]) -> Comparison:
    """ValueError where one of them is empty."""
    n, m = ours.total(), plain.total()
    if not n or not m:
        raise ValueError("no texts to compare")
    # In an order that does not know which side said what: small cells are merged along it.
    texts = sorted({*ours, *plain}, key=lambda text: (-ours[text] - plain[text], repr(text)))
    pairs = [(ours[text], plain[text]) for text in texts]
    variation = 0.5 * sum(abs(a / n - b / m) for a, b in pairs)
    shares = [(a + b) / (n + m) for a, b in pairs]
    expected = sum(math.sqrt(s * (1.0 - s) * (1.0 / n + 1.0 / m) / (2.0 * math.pi)) for s in shares)
    cells = _merged(pairs, n, m)
    chi = sum((a - (a + b) * n / (n + m)) ** 2 / ((a + b) * n / (n + m)) for a, b in cells)
    chi += sum((b - (a + b) * m / (n + m)) ** 2 / ((a + b) * m / (n + m)) for a, b in cells)
    freedom = len(cells) - 1
    return Comparison(n + m, len(cells), chi, chi_squared_tail(chi, freedom), variation, expected)


def _merged(pairs: list[tuple[int, int]], n: int, m: int) -> list[tuple[int, int]]:
    """Cells that expect enough in both lots; of `pairs`, which descend, small ones are added up."""
    cells: list[tuple[int, int]] = []
    a_open = b_open = 0
    for a, b in pairs:
        a_open, b_open = a_open + a, b_open + b
        if (a_open + b_open) * min(n, m) / (n + m) >= _LEAST:
            cells.append((a_open, b_open))
            a_open = b_open = 0
    if a_open + b_open:
        a, b = cells.pop() if cells else (0, 0)
        cells.append((a + a_open, b + b_open))
    return cells


def chi_squared_tail(chi: float, freedom: int) -> float:
    """P(X >= chi) by Wilson and Hilferty's cube root (1931), good to a few per cent of the exponent."""
    if freedom <= 0:
        return 1.0
    spread = 2.0 / (9.0 * freedom)
    z = ((chi / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2.0))
