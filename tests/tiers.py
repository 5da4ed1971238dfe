"""The cases that run every day, and those only in `make test-long`."""

from collections.abc import Container, Iterable, Sequence
from itertools import cycle, islice, product

import pytest

Cases = list["pytest.ParameterSet"]


def everyday(cases: Iterable[object], chosen: Container[object]) -> Cases:
    """All cases, of which only the chosen are not `long`."""
    marks = pytest.mark.long
    return [pytest.param(case, marks=() if case in chosen else marks) for case in cases]


def l_shape(*axes: Iterable[object], corner: Sequence[object]) -> Cases:
    """All crossings of the axes; every day those that leave the corner along one axis at most."""
    cases = []
    for case in product(*axes):
        num_away = sum(value != usual for value, usual in zip(case, corner, strict=True))
        cases.append(pytest.param(*case, marks=pytest.mark.long if num_away > 1 else ()))
    return cases


def l_and_diagonal(*axes: Iterable[object], corner: Sequence[object]) -> Cases:
    """Every day the corner and what leaves it along one axis; a diagonal through the rest is long.

    For cases that take seconds, of which all crossings would take minutes:

        corner  x  x  x  x         x: every day
          x     d     d            d: long; every value but the corner's comes up
          x        d     d
    """
    values = [list(axis) for axis in axes]
    everyday = [
        (*corner[:at], value, *corner[at + 1 :])
        for at, axis in enumerate(values)
        for value in axis
        if value != corner[at]
    ]
    others = [
        [it for it in axis if it != usual] for axis, usual in zip(values, corner, strict=True)
    ]
    rows = zip(*map(cycle, others), strict=False)
    diagonal = [
        pytest.param(*row, marks=pytest.mark.long) for row in islice(rows, max(map(len, others)))
    ]
    return [pytest.param(*case) for case in (corner, *everyday)] + diagonal
