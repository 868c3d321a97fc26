"""Which cases a run takes.

Pairwise covering: a few cells of a product in which every two levels of every two factors still meet.
"""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Cell = tuple[Any, ...]  # one level of each factor


def pairs(cell: Cell) -> set[tuple[int, Any, int, Any]]:
    """The pairs of levels that meet in a cell."""
    return {(i, cell[i], j, cell[j]) for i, j in combinations(range(len(cell)), 2)}


def covering(
    cells: Sequence[Any],
    beside: Sequence[Any] = (),
    of: Callable[[Any], set[Any]] = pairs,
) -> list[Any]:
    """Some of `cells` in which, with those `beside` them, everything meets that meets in any of them: `of` a cell, its
    pairs of levels.

    Greedy, the same on every machine.
    """
    cells = random.Random(0).sample(
        cells, len(cells)
    )  # so that levels which no pair asks for any more still vary
    meeting = [of(cell) for cell in cells]
    number = {pair: 1 << bit for bit, pair in enumerate(set().union(*meeting))}
    masks = [sum(number[pair] for pair in its) for its in meeting]
    met = set().union(*map(of, beside))
    missing, chosen = sum(bit for pair, bit in number.items() if pair not in met), []
    while missing:
        best = max(range(len(cells)), key=lambda i: (masks[i] & missing).bit_count())
        missing &= ~masks[best]
        chosen.append(cells[best])
    return chosen


def slow_but(cases: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """The cases as parameters of a thorough test, all but a few of them marked slow."""
    cases = list(cases)
    assert all(case in cases for case in few), "a case that is not there is not run"
    return thorough_but(cases, few.__contains__, [])


def thorough_but(
    cases: Iterable[Any], now: Callable[[Any], bool], few: Collection[Any] | None = None
) -> list[Any]:
    """The cases as parameters of a test, those marked thorough that are not wanted `now`; with a `few` of these given,
    the others slow.
    """
    cases = list(cases)
    assert few is None or all(case in cases for case in few), (
        "a case that is not there is not run"
    )

    def mark(case: Any) -> Any:
        return pytest.mark.thorough if few is None or case in few else pytest.mark.slow

    return [pytest.param(case, marks=() if now(case) else mark(case)) for case in cases]
