"""Polynomials over GF(65497), many at a time.

1. Elements are residues below p = 65497 (``FIELD_PRIME``). The product of two fits 32 unsigned bits
   (65496² < 2³²), so all arithmetic is uint32 with numpy's fast division by a constant.
2. ``interpolate`` returns the one polynomial of degree below k through k points with different x: Newton's
   divided differences, then expansion to ascending powers. It is exact.
3. ``evaluate`` is Horner's rule.

Rows are independent polynomials; the cost of both is k passes over an [m, k] array.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.constants import FIELD_PRIME
from protocol.errors import LocalError

Elements = NDArray[np.uint32]
"""Field elements, uint32 below p."""

_P: Final = np.uint32(FIELD_PRIME)


def interpolate(x_mk: NDArray[Any], y_mk: NDArray[Any]) -> Elements:
    """Coefficients [m, k] in ascending powers of the m polynomials through ``(x, y)``, integer arrays [m, k] of
    residues. ``LocalError`` where the shapes differ, a value is no residue, or a row repeats an x."""
    x, y = _elements(x_mk), _elements(y_mk)
    if x.shape != y.shape or x.ndim != 2 or x.shape[1] == 0:
        raise LocalError(f"points of shapes {x.shape} and {y.shape} do not belong together")
    ordered = np.sort(x, axis=1)
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise LocalError("two points of one polynomial have the same x")
    inverse = inverses()
    newton = y.copy()
    k = x.shape[1]
    for order in range(1, k):
        run = _subtract(x[:, order:], x[:, :-order])
        rise = _subtract(newton[:, order:], newton[:, order - 1 : -1])
        newton[:, order:] = _reduce(rise * inverse[run])
    # Σ newton_i · Π_{j<i} (X − x_j), expanded from the innermost factor outwards
    coefficients = np.zeros_like(newton)
    coefficients[:, 0] = newton[:, k - 1]
    for i in range(k - 2, -1, -1):
        length = k - i
        shifted = _reduce(coefficients[:, :length] * _subtract(np.zeros_like(x[:, i : i + 1]), x[:, i : i + 1]))
        shifted[:, 1:] = _add(shifted[:, 1:], coefficients[:, : length - 1])
        shifted[:, 0] = _add(shifted[:, 0], newton[:, i])
        coefficients[:, :length] = shifted
    return coefficients


def evaluate(coefficients_mk: NDArray[Any], x_mj: NDArray[Any]) -> Elements:
    """The values [m, j] of m polynomials (ascending coefficients [m, k]) at j places each."""
    coefficients, x = _elements(coefficients_mk), _elements(x_mj)
    if coefficients.ndim != 2 or x.ndim != 2 or len(coefficients) != len(x) or coefficients.shape[1] == 0:
        raise LocalError(f"polynomials {coefficients.shape} and places {x.shape} do not belong together")
    value = np.broadcast_to(coefficients[:, -1:], x.shape)
    for power in range(coefficients.shape[1] - 2, -1, -1):
        value = _add(_reduce(value * x), coefficients[:, power : power + 1])
    return np.array(value)


def _elements(values: NDArray[Any]) -> Elements:
    if values.size and (int(values.min()) < 0 or int(values.max()) >= FIELD_PRIME):
        raise LocalError("a value is no residue of the field")
    return values.astype(np.uint32)


def _reduce(values: Elements) -> Elements:
    # five times as fast as numpy's % : division by a constant is vectorised, the remainder is not
    reduced: Elements = values - values // _P * _P
    return reduced


def _add(left: Elements, right: Elements) -> Elements:
    total: Elements = left + right
    wrapped: Elements = np.minimum(total, total - _P)  # below p the difference wraps around to something large
    return wrapped


def _subtract(left: Elements, right: Elements) -> Elements:
    difference: Elements = left - right
    wrapped: Elements = np.minimum(difference, difference + _P)
    return wrapped


@cache
def inverses() -> Elements:
    """``table[a]`` is a⁻¹; entry 0 is unused. inverse(i) = −⌊p/i⌋ · inverse(p mod i)."""
    table = [0, 1]
    for i in range(2, FIELD_PRIME):
        table.append((FIELD_PRIME - FIELD_PRIME // i) * table[FIELD_PRIME % i] % FIELD_PRIME)
    return np.array(table, dtype=np.uint32)
