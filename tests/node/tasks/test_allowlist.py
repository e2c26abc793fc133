from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from node.tasks.allowlist import DATASETS, REASONING_GYM_VERSION, REFUSED, UNSANDBOXED, Scorer
from node.workers.child_process import child_environment

NINE = {
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}
# Their entries hold no answer: any that meets the rules is right.
WITHOUT_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def package() -> Path:
    spec = PathFinder.find_spec("reasoning_gym")  # other tests may have put a stand-in among the modules
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def test_the_table_is_of_the_installed_version() -> None:
    assert importlib.metadata.version("reasoning-gym") == REASONING_GYM_VERSION


def test_every_data_set_of_the_package_is_admitted_or_refused_by_its_module() -> None:
    found = {}
    for path in package().rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "register_dataset(" not in text or path.name in ("factory.py", "version_manager.py"):
            continue
        names = {
            node.targets[0].id: node.value.value
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        found[names.get("DATASET_NAME", "composite")] = ".".join(path.relative_to(package()).with_suffix("").parts)
    assert found.pop("composite") == "composite"
    assert set(found) == set(DATASETS) | set(REFUSED) - {"composite"}
    assert not set(DATASETS) & set(REFUSED)
    for name, data_set in DATASETS.items():
        assert found[name] == data_set.module


def test_no_scorer_that_executes_loads_without_a_sandbox() -> None:
    executing = {
        name
        for name, data_set in DATASETS.items()
        if data_set.scorer in (Scorer.LITERAL, Scorer.ARITHMETIC, Scorer.EXPRESSION)
    }
    assert executing == NINE
    assert not UNSANDBOXED & NINE
    assert "coin_flip" not in UNSANDBOXED
    assert "chain_sum" in UNSANDBOXED


@pytest.fixture(scope="module")
def surveys(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("survey")
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.node.tasks.survey", direction, str(folder / direction)],
            stdout=subprocess.PIPE,
            env=child_environment({}),
        )
        for direction in ("forward", "backward")
    ]
    return [json.loads(process.communicate(timeout=250)[0]) for process in processes]


def test_two_processes_make_the_same_questions_and_rewards(surveys: list[dict[str, dict[str, Any]]]) -> None:
    forward, backward = surveys
    assert set(forward) == set(backward) == set(DATASETS)
    assert [name for name in DATASETS if forward[name]["digest"] != backward[name]["digest"]] == []


def test_the_right_answer_is_within_bounds_and_right(surveys: list[dict[str, dict[str, Any]]]) -> None:
    for name, row in surveys[0].items():
        expected = None if name in WITHOUT_ORACLE else 1_000_000
        assert set(row["oracle"]) == {expected}, name


def test_only_the_nine_run_code_in_an_answer(surveys: list[dict[str, dict[str, Any]]]) -> None:
    assert {name for name, row in surveys[0].items() if row["touched"]} == NINE
