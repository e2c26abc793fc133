"""Errors of the world outside the protocol."""

from __future__ import annotations

from node.errors import UserError, innermost


def test_the_error_in_groups_of_groups() -> None:
    error = ValueError("x")
    assert innermost(ExceptionGroup("a", [ExceptionGroup("b", [error]), KeyError()])) is error
    assert innermost(error) is error


def test_a_mistake_is_one_line_with_its_remedy() -> None:
    assert str(UserError("the disk\n is full", "free some room")) == "the disk is full; free some room"
    assert str(UserError("the disk is full: free some room")) == "the disk is full: free some room"
