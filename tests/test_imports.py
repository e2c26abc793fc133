"""Imports go one way, the daemon loads no torch, and what nodes agree on knows neither clock, disk nor chance."""

from __future__ import annotations

import ast
import subprocess
import sys
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
