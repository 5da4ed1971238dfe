"""The cases that run every day, and those only in `make test-long`."""

from collections.abc import Container, Iterable, Sequence
from itertools import product

import pytest

Cases = list["pytest.ParameterSet"]


def everyday(cases: Iterable[object], chosen: Container[object]) -> Cases:
    """All cases, of which only the chosen are not `long`."""
    marks = pytest.mark.long
    return [pytest.param(case, marks=() if case in chosen else marks) for case in cases]


def l_shape(rows: Sequence[object], columns: Sequence[object], *corner: object) -> Cases:
    """All pairs; every day those of the corner's row and of its column."""
    return [
        pytest.param(*pair, marks=() if set(pair) & set(corner) else pytest.mark.long)
        for pair in product(rows, columns)
    ]
