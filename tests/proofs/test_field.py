"""``proofs.field``: exact polynomials over GF(65497)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from proofs import field
from protocol.constants import FIELD_PRIME as P
from protocol.errors import LocalError

residues = st.integers(0, P - 1)


def matrix(*rows: list[int]) -> NDArray[Any]:
    return np.array(rows, dtype=np.int64)


def horner(coefficients: list[int], x: int) -> int:
    """The value in Python's integers."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % P
    return value


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(residues, residues), min_size=1, max_size=20, unique_by=lambda point: point[0]))
def test_the_polynomial_goes_through_its_points(points: list[tuple[int, int]]) -> None:
    x, y = matrix([point[0] for point in points]), matrix([point[1] for point in points])
    coefficients = field.interpolate(x, y)
    assert field.evaluate(coefficients, x).tolist() == y.tolist()
    assert [horner(coefficients[0].tolist(), place) for place in x[0].tolist()] == y[0].tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(residues, min_size=1, max_size=12), st.data())
def test_interpolation_recovers_the_coefficients(coefficients: list[int], data: st.DataObject) -> None:
    size = len(coefficients)
    x = data.draw(st.lists(residues, min_size=size, max_size=size, unique=True))
    y = field.evaluate(matrix(coefficients), matrix(x))
    assert field.interpolate(matrix(x), y)[0].tolist() == coefficients


def test_a_known_polynomial() -> None:
    x = matrix(list(range(0, 65_000, 13_000)))
    expected = [(1 + 2 * v + 3 * v**2 + 4 * v**3) % P for v in x[0].tolist()]
    assert field.evaluate(matrix([1, 2, 3, 4]), x)[0].tolist() == expected


def test_the_extremes_of_the_field_do_not_overflow() -> None:
    top = P - 1
    assert field.evaluate(matrix([top, top, top]), matrix([top]))[0].tolist() == [horner([top] * 3, top)]
    x, y = matrix([top, top - 1, 0, 1]), matrix([top, 0, top, top])
    assert field.evaluate(field.interpolate(x, y), x).tolist() == y.tolist()


def test_rows_are_independent() -> None:
    rng = np.random.default_rng(0)
    x = np.stack([rng.permutation(P)[:9] for _ in range(5)])
    y = rng.integers(0, P, (5, 9))
    together = field.interpolate(x, y)
    for row in range(5):
        assert field.interpolate(x[row : row + 1], y[row : row + 1]).tolist() == together[row : row + 1].tolist()


def test_every_inverse_is_one() -> None:
    values = np.arange(1, P, dtype=np.uint64)
    assert bool((values * field.inverses()[1:] % P == 1).all())


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (matrix([1, 1]), matrix([2, 3])),
        (matrix([1, P]), matrix([2, 3])),
        (matrix([1, -1]), matrix([2, 3])),
        (matrix([1, 2]), matrix([2, P])),
        (matrix([1, 2]), matrix([2, 3, 4])),
        (np.zeros((1, 0), dtype=np.int64), np.zeros((1, 0), dtype=np.int64)),
    ],
)
def test_what_is_no_set_of_points_is_our_own_mistake(x: NDArray[Any], y: NDArray[Any]) -> None:
    with pytest.raises(LocalError):
        field.interpolate(x, y)


def test_places_must_fit_the_polynomials() -> None:
    with pytest.raises(LocalError):
        field.evaluate(matrix([1, 2]), matrix([1], [2]))
