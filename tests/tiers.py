"""The cases that run every day, and those only in `make test-long`."""

from collections.abc import Container, Iterable, Sequence
from itertools import product

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
