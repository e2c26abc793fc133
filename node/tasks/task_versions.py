"""The versions that a task's questions and rewards come from: what a genesis pins, and whether this machine has them.

Rewards are consensus, so a node with another version must not take part.

1. A pin is the version of reasoning-gym (its data sets), or ``name==version`` items with spaces: what compares
   mathematics (``MATH``), the Python that runs programs ("python==3.11": the minor version decides what is a valid
   program), the package that a task came in.
2. Questions whose answers are compared as texts rest on no package; their pin is the version of the rule, ``EXACT``.
3. The packages of ``MATH`` are those whose hostile inputs ``node.tasks.answer_bounds`` was tried with: others are
   refused whatever a genesis says.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable
from typing import Any, Final

from node.errors import UserError
from node.tasks.allowlist import REASONING_GYM_VERSION

MATH_PACKAGES: Final = (
    ("math-verify", "0.9.0"),
    ("latex2sympy2-extended", "1.11.0"),
    ("antlr4-python3-runtime", "4.13.2"),
    ("sympy", "1.14.0"),
    ("mpmath", "1.3.0"),
)
MATH: Final = " ".join(f"{name}=={version}" for name, version in MATH_PACKAGES)
EXACT: Final = "exact==1"
ALGEBRA: Final = MATH_PACKAGES[3:]
"""What reasoning-gym's scorers of algebra rest on besides."""


def parameters(name: str, text: str) -> dict[str, Any]:
    """A task's parameters out of JSON text. Raises ``UserError``."""
    try:
        values = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"the parameters of {name} are not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"the parameters of {name} must be a JSON object such as {{}}")
    return values


def problem(requirements: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """What is wrong with the first of (distribution, version) pairs that is not here, and its remedy; else None."""
    for name, version in requirements:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed", f"install {name}=={version}"
        if found != version:
            return f"{name} {found} is installed, the domain pins {version}", f"install {name}=={version}"
    return None


def check(requirements: Iterable[tuple[str, str]]) -> None:
    """Raise ``UserError`` for the first of (distribution, version) pairs that is not installed here."""
    if (found := problem(requirements)) is not None:
        raise UserError(*found)


def check_gym(pinned: str) -> None:
    """Raise ``UserError`` unless ``pinned``, what this Farflung knows and what is installed of reasoning-gym agree."""
    _known((("reasoning-gym", REASONING_GYM_VERSION),), (("reasoning-gym", pinned),))
    check((("reasoning-gym", pinned),))


def check_math(pinned: str) -> None:
    """Raise ``UserError`` unless ``pinned``, what this Farflung knows and what is installed agree."""
    _known(MATH_PACKAGES, requirements(pinned))
    check(MATH_PACKAGES)


def check_exact(pinned: str) -> None:
    """Raise ``UserError`` unless ``pinned`` is the rule of comparing texts that this Farflung knows."""
    _known(requirements(EXACT), requirements(pinned))


def requirements(pinned: str) -> tuple[tuple[str, str], ...]:
    """The (distribution, version) pairs of a pin of ``name==version`` items. Raises ``UserError`` for another form."""
    pairs = tuple(tuple(item.split("==")) for item in pinned.split())
    if not pairs or any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise UserError(f"the domain pins {pinned!r}, which is no list of packages", "ask the domain's creator")
    return pairs  # type: ignore[return-value]


def _known(known: Iterable[tuple[str, str]], pinned: Iterable[tuple[str, str]]) -> None:
    wanted, supported = dict(pinned), dict(known)
    remedy = "use the Farflung version that the domain's creator names"
    if wanted.keys() != supported.keys():
        theirs, ours = (
            " ".join(f"{name}=={version}" for name, version in table.items()) for table in (wanted, supported)
        )
        raise UserError(f"the domain pins {theirs}, this Farflung scores such a task with {ours}", remedy)
    for name, version in wanted.items():
        if version != supported[name]:
            raise UserError(f"the domain pins {name} {version}, this Farflung knows {supported[name]}", remedy)


def pinned_python(name: str, pinned: str) -> str:
    """The minor version of Python that a code task pins. Raises ``UserError``."""
    pairs = requirements(pinned)
    if [item for item, _ in pairs] != ["python"]:
        raise UserError(f"{name} pins {pinned!r} instead of a version of Python", "ask the domain's creator")
    return pairs[0][1]
