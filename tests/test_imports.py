"""Imports go one way and in no circle, a name stands for one module, the daemon loads no torch, and what nodes agree on
knows neither clock, disk nor chance."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("protocol", "proofs", "node")

# Modules that bring time, input and output, the environment or the machine's own randomness.
IMPURE = {
    *("aiosqlite", "anyio", "asyncio", "ctypes", "datetime", "fcntl", "getpass", "glob", "http", "io", "libp2p"),
    *("logging", "mmap", "multiprocessing", "os", "pathlib", "platform", "random", "resource", "secrets", "select"),
    *("shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "trio"),
    *("trio_asyncio", "urllib", "uuid"),
}
IMPURE_CALLS = {"open", "input", "print", "exec", "eval", "__import__", "breakpoint"}
# numpy's and torch's global generators; a generator made from a seed is an argument like any other.
GLOBAL_RANDOMNESS = {
    "seed",
    "rand",
    "randn",
    "randint",
    "random",
    "normal",
    "uniform",
    "choice",
    "manual_seed",
    "shuffle",
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            yield from (alias.name for alias in item.names)
        elif isinstance(item, ast.ImportFrom):
            assert item.level == 0, "relative imports hide the layer"
            yield item.module or ""


def impurities(tree: ast.AST) -> Iterator[str]:
    """What in a module of the protocol or the proofs reaches beyond its arguments."""
    yield from (name for name in imported(tree) if name.partition(".")[0] in IMPURE)
    for item in ast.walk(tree):
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id in IMPURE_CALLS:
            yield f"{item.func.id}()"
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute):
            text = ast.unparse(item.func)
            owner = text.rpartition(".")[0]
            if owner in ("np.random", "numpy.random", "torch", "torch.random") and item.func.attr in GLOBAL_RANDOMNESS:
                yield f"{text}()"
            if text.endswith("random.default_rng") and not item.args:
                yield f"{text}() without a seed"


@pytest.mark.parametrize("layer", range(len(LAYERS)), ids=LAYERS)
def test_imports_go_one_way(layer: int) -> None:
    above = {*LAYERS[layer + 1 :], "tests"}
    for path in modules(LAYERS[layer]):
        names = {name.partition(".")[0] for name in imported(ast.parse(path.read_text()))}
        assert not names & above, f"{path.relative_to(ROOT)} imports {names & above}"


def graph(root: Path) -> dict[str, set[str]]:
    """Which modules each module imports, those under ``TYPE_CHECKING`` and within functions among them."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for layer in LAYERS
        for path in sorted((root / layer).rglob("*.py"))
    }
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        imports: set[str] = set()
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, ast.Import):
                imports |= {alias.name for alias in item.names}
            elif isinstance(item, ast.ImportFrom):
                inner = {f"{item.module}.{alias.name}" for alias in item.names}
                imports |= inner & files.keys()
                if inner - files.keys():
                    imports.add(item.module or "")
        found[name] = (imports & files.keys()) - {name}
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """A circle of imports, the first module again at its end; empty where there is none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_module_is_part_of_a_circle() -> None:
    edges = graph(ROOT)
    assert len(edges) > 200
    assert circle(edges) == []


def test_the_check_sees_circles(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "__init__.py").touch()
    (tmp_path / "node" / "a.py").write_text("from node.b import x\n")
    (tmp_path / "node" / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from node import c\n"
    )
    (tmp_path / "node" / "c.py").write_text("def f():\n    import node.a\n")
    assert set(circle(graph(tmp_path))) == {"node.a", "node.b", "node.c"}
    (tmp_path / "node" / "c.py").write_text("")
    assert circle(graph(tmp_path)) == []


def test_a_name_stands_for_one_module() -> None:
    """Commands bear their own names, and a room's name is its ``__init__``'s."""
    stems = Counter(
        path.stem
        for layer in LAYERS
        for path in modules(layer)
        if path.stem not in ("__init__", "errors") and path.parent != ROOT / "node" / "cli"
    )
    assert [stem for stem, count in stems.items() if count > 1] == []


def test_a_name_stands_for_one_class() -> None:
    names = Counter(
        item.name
        for layer in LAYERS
        for path in modules(layer)
        for item in ast.parse(path.read_text()).body
        if isinstance(item, ast.ClassDef) and not item.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_what_stands_directly_in_node_wires_and_configures_a_daemon() -> None:
    assert {path.stem for path in (ROOT / "node").glob("*.py")} == {
        *("__init__", "daemon", "context", "config", "errors"),
    }


@pytest.mark.parametrize("package", ["protocol", "proofs"])
def test_no_clock_input_output_or_global_randomness(package: str) -> None:
    found = {path.name: list(impurities(ast.parse(path.read_text()))) for path in modules(package)}
    assert len(found) > 1
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from os import environ",
        "import os.path",
        "open('x')",
        "import numpy as np\nnp.random.rand(3)",
        "import numpy as np\nnp.random.default_rng()",
        "import torch\ntorch.manual_seed(0)",
    ],
)
def test_the_check_sees_impurities(source: str) -> None:
    assert list(impurities(ast.parse(source)))


def test_the_check_allows_a_seeded_generator() -> None:
    assert not list(impurities(ast.parse("import numpy as np\nnp.random.default_rng(seed).normal()")))


def test_protocol_needs_no_torch() -> None:
    for path in modules("protocol"):
        assert "torch" not in {name.partition(".")[0] for name in imported(ast.parse(path.read_text()))}, path


@pytest.mark.parametrize("module", ["node.daemon", "node.devnet.network", "node.cli.main"])
def test_the_daemon_imports_no_torch_and_no_scorer(module: str) -> None:
    heavy = ("torch", "vllm", "transformers", "reasoning_gym", "math_verify", "sympy", "tokenizers")
    code = f"import sys, {module}; print(*(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""
