"""What the documents name is in the tree, and decisions have their form."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
DECISIONS: Final = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
DOCUMENTS: Final = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HEADINGS: Final = ["Context", "Decision", "What it costs", "What would change it"]
MOST_LINES: Final = 30

FENCE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE: Final = re.compile(r"`([^`\n]+)`")
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
# A path from the top, a file's name alone, or a module and what it defines.
PATH: Final = re.compile(r"(?:docs|node|proofs|protocol|systemd|tests)(?:/[\w.-]+)*/?")
FILE: Final = re.compile(r"\w+\.py")
MODULE: Final = re.compile(r"(?:node|proofs|protocol|tests)(?:\.\w+)+")

parametrized = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def words(document: Path) -> Iterator[str]:
    """The words between backticks, outside of fences."""
    for code in CODE.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        yield from code.split()


def defined(path: Path) -> set[str]:
    """The names at the top level of a module."""
    found: set[str] = set()
    for item in ast.parse(path.read_text(encoding="utf-8")).body:
        match item:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=targets):
                found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def names_something(module: str) -> bool:
    """Whether ``module`` is a module or package of the tree, or a name at the top level of one."""
    place = ROOT.joinpath(*module.split("."))
    if place.is_dir() or place.with_suffix(".py").is_file():
        return True
    parent, name = place.parent, place.name
    source = parent / "__init__.py" if parent.is_dir() else parent.with_suffix(".py")
    return source.is_file() and name in defined(source)


@parametrized
def test_links_lead_somewhere(document: Path) -> None:
    targets = LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8")))
    local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in local if not (document.parent / target).exists()] == []


@parametrized
def test_paths_and_modules_exist(document: Path) -> None:
    packages = ("node", "proofs", "protocol", "tests")
    files = {path.name for package in packages for path in (ROOT / package).rglob("*.py")}
    wrong = [
        word
        for word in words(document)
        if (PATH.fullmatch(word) and not (ROOT / word).exists())
        or (FILE.fullmatch(word) and word not in files)
        or (MODULE.fullmatch(word) and not names_something(word))
    ]
    assert wrong == []


def test_the_tree_of_the_readme_exists() -> None:
    """Lines of a name and what it holds; two more spaces before the name are one level down."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text[text.index("## What is where") :].split("```")[1]
    entries = re.findall(r"^((?:  )*)([\w./-]+) ", tree, re.MULTILINE)
    assert len(entries) > 10
    path: list[str] = []
    missing = []
    for indent, name in entries:
        path[len(indent) // 2 :] = [name]
        if not ROOT.joinpath(*path).exists():
            missing.append("".join(path))
    assert missing == []


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_its_form(decision: Path) -> None:
    lines = decision.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith(f"# {int(decision.name[:3])}. ")
    assert [line[3:] for line in lines if line.startswith("## ")] == HEADINGS
    assert len(lines) <= MOST_LINES


def test_decisions_are_numbered_and_listed() -> None:
    assert DECISIONS
    assert [int(path.name[:3]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    overview = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    listed = [f"- [{path.read_text(encoding='utf-8').splitlines()[0][2:]}]({path.name})" for path in DECISIONS]
    assert [line for line in overview.splitlines() if line.startswith("- ")] == listed
