from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.tasks import answer_bounds

CALL = "__import__('os').system('touch x')"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("42", "42"),
        ("  42 \n", "42"),
        ("I think <answer> 1 </answer> no, <answer>\n2</answer> it is", "2"),
        ("<answer>3", "<answer>3"),
        ("4</answer>", "4</answer>"),
        ("</answer><answer>5", "</answer><answer>5"),
        ("", ""),
        ("a\tb\nc", "a\tb\nc"),
        ("a\0b", None),
        ("a\x1bb", None),
        ("(" * answer_bounds.MAX_NESTING, "(" * answer_bounds.MAX_NESTING),
        ("(" * (answer_bounds.MAX_NESTING + 1), None),
        ("(" * 3000 + ")" * 3000, None),
        ("x" * answer_bounds.MAX_ANSWER, "x" * answer_bounds.MAX_ANSWER),
        ("x" * (answer_bounds.MAX_ANSWER + 1), None),
        (" " * answer_bounds.MAX_RESPONSE, ""),
        (" " * (answer_bounds.MAX_RESPONSE + 1), None),
    ],
)
def test_answer_of_a_response(response: str, answer: str | None) -> None:
    assert answer_bounds.answer_of(response) == answer


def test_many_open_tags_take_no_time() -> None:
    assert answer_bounds.answer_of("<answer>" * 30_000 + "</answer>") == ""


@pytest.mark.parametrize(("text", "depth"), [("", 0), ("a(b[c]d)", 2), (")))(", 1), ("()()", 1), ("([{", 3)])
def test_nesting(text: str, depth: int) -> None:
    assert answer_bounds.nesting(text) == depth


@pytest.mark.parametrize("answer", ["[1, 2]", "['a', 'b']", "[[0, -1], (2, '')]", "'abc'", "[" * 40 + "]" * 40])
def test_literals(answer: str) -> None:
    assert answer_bounds.is_literal(answer)


@pytest.mark.parametrize(
    "answer",
    [
        CALL,
        f"[{CALL}]",
        "9**9**9",
        "[0 for x in 'ab']",
        "[1]*9",
        "x",
        "{1: 2}",
        "1.5",
        "[*x]",
        "",
        "[",
        "-" * 9000 + "1",
        "[" * 60 + "]" * 60,
        "f'{x}'",
        "[1]\n[2]",
    ],
)
def test_no_literals(answer: str) -> None:
    assert not answer_bounds.is_literal(answer)


@pytest.mark.parametrize("answer", ["1", "(1+2)*3 - 4/5", "-1 + 2", "99999999999999999999", "24/(3-8/3)"])
def test_arithmetic(answer: str) -> None:
    assert answer_bounds.is_arithmetic(answer)


@pytest.mark.parametrize(
    "answer",
    [
        CALL,
        "9**9**9",
        "2**3",
        "7//2",
        "1(2)",
        "1e9",
        "x",
        "1.5",
        "0x10",
        "",
        "(",
        "9" * 21,
        "1+" * 600 + "1",
        "-" * 900 + "1",
        "1,2",
        "1 if 1 else 2",
        "+".join(["1"] * 100),
    ],
)
def test_no_arithmetic(answer: str) -> None:
    assert not answer_bounds.is_arithmetic(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "x**2 + 3*x",
        "2*sin(x)*exp(x) + C",
        "x**(7/2)/7",
        "x**-2",
        "x**y",
        "1.5*x",
        "(x**9)**99",
        "log(x)/pi",
        "a1*b2",
        "x**0.5",
    ],
)
def test_expressions(answer: str) -> None:
    assert answer_bounds.is_expression(answer)


@pytest.mark.parametrize(
    "answer",
    [
        CALL,
        "9**9**9",
        "(x**99)**99",
        "2**(2**9)",
        "x**1001",
        "x**(999*999)",
        "x**sin(x)",
        "x.args",
        "1e999",
        "exec(x)",
        "[x for x in y]",
        "log(x, 2)",
        "lambda: x",
        "x if x else y",
        "word",
        "x; y",
        "x == y",
        "S('x')",
        "x!",
        "x^2",
        "",
    ],
)
def test_no_expressions(answer: str) -> None:
    assert not answer_bounds.is_expression(answer)


@pytest.mark.parametrize("answer", ["1/3", "0.5", "-2", "1e-3", "1,000", "1 / 3", "+7"])
def test_numbers(answer: str) -> None:
    assert answer_bounds.is_number(answer)


@pytest.mark.parametrize("answer", ["1e999999999", "1e-9999", "nan", "", "x", "1/2/3", "1/1e9", "9" * 2000])
def test_no_numbers(answer: str) -> None:
    assert not answer_bounds.is_number(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "42",
        "$x^2+1$",
        r"\frac{1}{2}",
        r"\frac12",
        r"3\sqrt{2}",
        "2^{10}",
        "2^{-1}",
        "5!",
        "3! + 4!",
        r"90^\circ",
        "x^{1/2}",
        "e^{2x+3}",
        "1e5",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        "x^{10}+x^9+x^8+x^7",
        "(x+1)^2(x-1)^3",
        "2^{100}",
        r"2^{\frac{1}{2}}",
        "the answer is $7$",
        r"\{1, 2\}",
        r"(-\infty, 3]",
        "x^n",
        "2^{n+1}",
    ],
)
def test_latex(answer: str) -> None:
    assert answer_bounds.is_latex(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}",
        CALL,
        "9**9**9",
        "2^3^4",
        "9^999^999",
        "x^{1001}",
        "((9^{999})^{999})",
        "((x+1)^{999}+x)",
        "1e9999",
        "5!!",
        "100!",
        "(5!)!",
        r"\int x",
        "∫ x",
        "Σ 1/n",
        r"\sum_{n} n",
        "∏ n",
        r"\lim_{x} x",
        "the sum of it",
        r"x^\frac{999999}{1}",
        r"\write18{x}",
        "9" * 21,
        "{" * 11 + "}" * 11,
        "1+" * 600 + "1",
        r"x^{\sin x}",
    ],
)
def test_no_latex(answer: str) -> None:
    assert not answer_bounds.is_latex(answer)


@given(st.text() | st.text(alphabet="0123456789+-*/()[]{}^!eExX\\ \n'\",.", max_size=60))
def test_no_text_raises(text: str) -> None:
    answer_bounds.answer_of(text)
    for check in (
        answer_bounds.is_literal,
        answer_bounds.is_arithmetic,
        answer_bounds.is_expression,
        answer_bounds.is_number,
        answer_bounds.is_latex,
    ):
        check(text)
