"""What an answer may look like before any scorer sees it.

A scorer reads an attacker's text, and some of them hand it to ``eval`` or to sympy's parser, which is ``eval`` as
well. A sandbox keeps such code from the machine, but not from the scorer beside it: an answer that runs code could
turn every later reward of the same process into a pass. So an answer is judged by its form first, and what is out of
bounds scores 0. That is decided by the text alone, alike on every machine.

1. A response has at most ``MAX_RESPONSE`` characters. Its answer is what stands in its last ``<answer>…</answer>``,
   else all of it, without the white space around it, and has at most ``MAX_ANSWER`` characters.
2. An answer holds no control character but tab, line feed and carriage return, and brackets at most ``MAX_NESTING``
   deep.
3. ``is_literal``: a Python list, tuple, string or integer, for scorers that ``eval`` a list.
4. ``is_arithmetic``: integers, ``+ - * /`` and brackets, for scorers that parse sums.
5. ``is_expression``: algebra of one-letter names and the elementary functions with small constant exponents.
6. ``is_number``: a number or a fraction whose exponent has at most three digits (``Fraction("1e999999999")`` computes
   all its digits).
7. ``is_latex``: mathematics without integrals, sums, products or limits, factorials at most of two digits and
   exponents at most of three, none of them nested; no quotes, semicolons or doubled underscores.

``answer_of`` and the ``is_`` functions raise nothing, whatever the text.
"""

from __future__ import annotations

import ast
import re
from typing import Final

MAX_RESPONSE: Final = 1 << 18
MAX_ANSWER: Final = 1 << 14
MAX_NESTING: Final = 50
MAX_EXPRESSION: Final = 1_000
"""Characters of an answer that goes to sympy."""
MAX_LATEX_NESTING: Final = 10
MAX_DIGITS: Final = 20
"""Digits in a row in an answer that goes to sympy."""
MAX_POWER: Final = 1_000
"""Largest product of the exponents on the way from an expression's root to a leaf."""

MAX_BRACKET_POWER: Final = 100
"""Largest product of the exponents of brackets in LaTeX: sympy takes 18 s to compare with (x+1)^{999}+x."""

_FUNCTIONS_TEXT: Final = (
    "Abs abs acos acosh asin asinh atan atanh cos cosh cot csc exp ln log sec sin sinh sqrt tan tanh"
)
FUNCTIONS: Final = frozenset(_FUNCTIONS_TEXT.split())
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BRACKETS: Final = re.compile(r"[()\[\]{}]")
_LONG_NUMBER: Final = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
_ARITHMETIC: Final = re.compile(r"[0-9+\-*/() \n]+")
_EXPRESSION: Final = re.compile(r"[A-Za-z0-9+\-*/(). \n]+")
_NAME: Final = re.compile(r"[A-Za-z][0-9]?|pi")
_NUMBER: Final = re.compile(r"[+-]?[0-9.,_]{1,1000}(?:[eE][+-]?[0-9]{1,3}|/[0-9.,_]{1,1000})?")

_COMMANDS_TEXT: Final = (
    "frac dfrac tfrac cfrac sqrt cdot times div pm mp left right pi infty sin cos tan cot sec csc arcsin arccos arctan"
    " sinh cosh tanh ln log exp le leq ge geq lt gt ne neq text textbf mathrm mathbf mathbb mathcal boxed fbox circ"
    " degree quad qquad cup cap in emptyset varnothing setminus begin end alpha beta gamma delta epsilon varepsilon"
    " zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Omega"
    " big Big bigg Bigg displaystyle approx equiv mid lvert rvert langle rangle hline i imath"
)
_COMMANDS: Final = frozenset(_COMMANDS_TEXT.split())
_COMMAND: Final = re.compile(r"\\([A-Za-z]+)")
_CODE: Final = re.compile(r"[\"'`;@#~?]|__")
_BINDERS: Final = re.compile(r"[∫∬∭∮Σ∑Π∏]|\b(?:int|integrate|sum|summation|prod|product|lim|limit)\b", re.IGNORECASE)
_POWER: Final = re.compile(r"\^|\*\*|(?<=[0-9.])[eE](?=[+-]?[0-9])")
# What may stand in an exponent: -1, 2n, 1/2, n+1.
_SIMPLE: Final = r"[+-]?(?:[0-9]{1,2}/[0-9]{1,2}|[0-9]{0,3}[A-Za-z]?(?:[+-][0-9]{0,3}[A-Za-z]?)?)"
_EXPONENT: Final = re.compile(
    rf"\s*(?:\{{\s*{_SIMPLE}\s*\}}|\(\s*{_SIMPLE}\s*\)|\{{\\circ\s*\}}|\\circ|\{{[+-]?\\frac\{{[0-9]{{1,2}}\}}\{{[0-9]{{1,2}}\}}\}}"
    r"|[+-]?[0-9]{1,3}(?![0-9])|[A-Za-z])"
)
_FACTORIAL: Final = re.compile(r"!")
_SMALL_FACTORIAL: Final = re.compile(r"(?<![0-9!)}\]])[0-9]{1,2}!(?!!)")


def answer_of(response: str) -> str | None:
    """The answer in a response (rule 1), or None where it is out of the bounds of rules 1 and 2."""
    if len(response) > MAX_RESPONSE:
        return None
    answer = response
    end = response.rfind("</answer>")
    if end >= 0:
        start = response.rfind("<answer>", 0, end)
        if start >= 0:
            answer = response[start + len("<answer>") : end]
    answer = answer.strip()
    if len(answer) > MAX_ANSWER or _CONTROL.search(answer) or nesting(answer) > MAX_NESTING:
        return None
    return answer


def nesting(text: str) -> int:
    """How deep the brackets of ``text`` are nested. A closing bracket that matches nothing is ignored."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(text):
        if bracket in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif depth:
            depth -= 1
    return deepest


def parsed(text: str) -> ast.expr | None:
    """The Python expression that ``text`` is, None where it is none."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def is_literal(answer: str) -> bool:
    """Rule 3."""
    tree = parsed(answer)
    return tree is not None and _literal(tree, MAX_NESTING)


def _literal(tree: ast.expr, depth: int) -> bool:
    if depth == 0:
        return False
    match tree:
        case ast.Constant(value=value):
            return isinstance(value, (str, int))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return type(value) is int
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return all(_literal(part, depth - 1) for part in parts)
    return False


def is_arithmetic(answer: str) -> bool:
    """Rule 4."""
    if len(answer) > MAX_EXPRESSION or not _ARITHMETIC.fullmatch(answer) or _LONG_NUMBER.search(answer):
        return False
    tree = parsed(answer)
    return tree is not None and _arithmetic(tree, MAX_NESTING)


def _arithmetic(tree: ast.expr, depth: int) -> bool:
    if depth == 0:
        return False
    match tree:
        case ast.Constant():
            return True
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=part):
            return _arithmetic(part, depth - 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _arithmetic(left, depth - 1) and _arithmetic(right, depth - 1)
    return False


def is_expression(answer: str) -> bool:
    """Rule 5."""
    if len(answer) > MAX_EXPRESSION or not _EXPRESSION.fullmatch(answer) or _LONG_NUMBER.search(answer):
        return False
    tree = parsed(answer)
    return tree is not None and _expression(tree, 2 * MAX_NESTING, 1)


def _expression(tree: ast.expr, depth: int, power: int) -> bool:
    """``power`` is the product of the exponents above ``tree``."""
    if depth == 0:
        return False
    match tree:
        case ast.Constant(value=value):
            # 1e999 as a constant would be infinite, and sympy would compute all its digits.
            return type(value) is int or (isinstance(value, float) and 1e-20 < value < 1e20)
        case ast.Name(id=name):
            return _NAME.fullmatch(name) is not None
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=part):
            return _expression(part, depth - 1, power)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _expression(left, depth - 1, power) and _expression(right, depth - 1, power)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            largest = _exponent(right, 8)
            power = power * max(largest, 1)
            return largest >= 0 and power <= MAX_POWER and _expression(left, depth - 1, power)
        case ast.Call(func=ast.Name(id=name), args=[part], keywords=[]):
            # An exponential is a power as well: sympy evaluates (e**999)**999 only symbolically, so it counts once.
            return name in FUNCTIONS and _expression(part, depth - 1, power)
    return False


def _exponent(tree: ast.expr, depth: int) -> int:
    """The product of an exponent's constants, which bounds it; -1 where it holds anything but constants and names."""
    if depth == 0:
        return -1
    match tree:
        case ast.Constant(value=int() as value):
            return value if value <= MAX_POWER else -1
        case ast.Constant(value=float() as value):
            return int(value) + 1 if value <= MAX_POWER else -1
        case ast.Name(id=name):
            return 1 if _NAME.fullmatch(name) else -1
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=part):
            return _exponent(part, depth - 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            a, b = _exponent(left, depth - 1), _exponent(right, depth - 1)
            return -1 if a < 0 or b < 0 else max(a, 1) * max(b, 1) + 1
    return -1


def is_number(answer: str) -> bool:
    """Rule 6."""
    return _NUMBER.fullmatch(answer.replace(" ", "")) is not None


def is_latex(answer: str) -> bool:
    """Rule 7."""
    if len(answer) > MAX_EXPRESSION or nesting(answer) > MAX_LATEX_NESTING or _LONG_NUMBER.search(answer):
        return False
    if (
        _CODE.search(answer)
        or _BINDERS.search(answer)
        or any(command not in _COMMANDS for command in _COMMAND.findall(answer))
    ):
        return False
    if len(_FACTORIAL.findall(answer)) != len(_SMALL_FACTORIAL.findall(answer)):
        return False
    return _powers_are_small(answer)


def _powers_are_small(answer: str) -> bool:
    """Whether every exponent is simple, and their product, as far as they can stand on each other, is bounded."""
    stacked, largest, end = 1, 1, -1
    for power in _POWER.finditer(answer):
        exponent = _EXPONENT.match(answer, power.end())
        base = answer[: power.start()].rstrip()
        if exponent is None or len(base) == end:  # a power as an exponent: 9**9**9
            return False
        value = 1 + sum(int(digits) for digits in re.findall(r"[0-9]+", exponent.group()))
        # Only a bracket can hold a power that this one is put upon.
        if base.endswith((")", "}", "]")):
            stacked *= value
        else:
            largest = max(largest, value)
        end = exponent.end()
    return stacked <= MAX_BRACKET_POWER + 1 and stacked * largest <= MAX_POWER + 1
