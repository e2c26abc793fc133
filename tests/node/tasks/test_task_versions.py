from __future__ import annotations

import importlib.metadata

import pytest

from node.errors import UserError
from node.tasks import task_versions


def test_what_is_pinned_is_what_is_installed() -> None:
    for name, version in task_versions.MATH_PACKAGES:
        assert importlib.metadata.version(name) == version
    task_versions.check_math(task_versions.MATH)
    # It has to fit into a genesis.
    assert len(task_versions.MATH) <= 200


def test_what_is_missing_is_told_with_its_remedy() -> None:
    with pytest.raises(UserError, match=r"hypothesis .* is installed, the domain pins 0; install hypothesis==0"):
        task_versions.check([("hypothesis", "0")])
    with pytest.raises(UserError, match="no-such-package is not installed; install no-such-package==1"):
        task_versions.check([("no-such-package", "1")])


@pytest.mark.parametrize("pinned", ["", " ", "0.9.0", "a==", "==1", "a==1==2", "a==1 b"])
def test_other_forms_are_refused(pinned: str) -> None:
    with pytest.raises(UserError, match="which is no list of packages; ask the domain's creator"):
        task_versions.requirements(pinned)


def test_parameters() -> None:
    assert task_versions.parameters("x", "") == {}
    assert task_versions.parameters("x", '{"a": 1}') == {"a": 1}
    for text in ("[", "[1]", "3", "[" * 100_000):
        with pytest.raises(UserError, match="the parameters of x"):
            task_versions.parameters("x", text)
