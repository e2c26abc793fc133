"""reasoning-gym data sets as tasks: a question for an item's number, a reward for a response.

1. The installed reasoning-gym must have the version that the domain's genesis pins, which must be the one whose data
   sets ``node.tasks.allowlist`` knows: questions and rewards are consensus. So are sympy and mpmath where a scorer uses
   them.
2. Only the modules that a task needs are imported. reasoning-gym's own package imports all hundred data sets, and with
   them sympy, numpy and matplotlib: 1.6 s and 110 MB against 0.08 s and 15 MB for ``chain_sum``.
3. An item is any number in 0…2³¹−1. A data set with finitely many items takes the number modulo their count. A
   generator that raises on an item is asked for the following ones, at most ``_ATTEMPTS`` in all.
4. The global random generator is seeded with the item before a question is made and before a response is scored, and
   the process has PYTHONHASHSEED=0 (five generators iterate over sets of strings).
5. A reward is the scorer's, rounded to millionths and put between 0 and one million. What is out of the bounds of
   ``node.tasks.answer_bounds``, an exception and a NaN score 0. ``MemoryError`` and ``RecursionError`` depend on the
   machine and are passed on: the reward is undecidable.

Importing this module imports no reasoning-gym; making a task does.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import math
import pickle
import random
import sys
import types
from collections.abc import Iterable
from typing import Any

from node.errors import UserError
from node.tasks import answer_bounds, task_versions
from node.tasks.allowlist import DATASETS, REASONING_GYM_VERSION, REFUSED, UNSANDBOXED, DataSet, Scorer
from protocol.constants import MILLION
from protocol.taskset import MAX_ITEM

MAX_SIZE = 100_000
_ATTEMPTS = 8
_KEPT_ENTRIES = 256
# NaN equals nothing and is never larger than a bound, so this scorer's min(1, NaN) is a pass.
_TRUSTS_NAN = frozenset({"complex_arithmetic"})


def close_match(name: str, known: Iterable[str]) -> str:
    """ " (did you mean …?)" with the names closest to ``name``, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def check_name(name: str, *, sandboxed: bool) -> DataSet:
    """The data set called ``name``. Raises ``UserError`` unless a domain may use it here."""
    if name in REFUSED:
        raise UserError(f"the reasoning-gym data set {name} cannot be used: {REFUSED[name]}", "leave it out")
    if name not in DATASETS:
        raise UserError(f"unknown reasoning-gym data set {name!r}{close_match(name, DATASETS)}")
    if not sandboxed and name not in UNSANDBOXED:
        raise UserError(f"the reasoning-gym data set {name} {DATASETS[name].scorer.value}, and so needs a sandbox")
    return DATASETS[name]


def _install_shells() -> None:
    """Put empty packages in the place of reasoning-gym's own, so that one data set can be imported alone (rule 2)."""
    if "reasoning_gym" in sys.modules:
        return
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("reasoning-gym is not installed", f"install reasoning-gym=={REASONING_GYM_VERSION}")
    root = spec.submodule_search_locations[0]
    categories = {data_set.module.split(".")[0] for data_set in DATASETS.values()}
    for package, path in [("", root), *((f".{category}", f"{root}/{category}") for category in sorted(categories))]:
        shell = types.ModuleType(f"reasoning_gym{package}")
        shell.__path__ = [path]
        sys.modules[shell.__name__] = shell


def _texts(value: object) -> set[str]:
    """Every string in a configuration's value, however deep."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, dict):
        return {text for pair in value.items() for part in pair for text in _texts(part)}
    if isinstance(value, (list, tuple, set, frozenset)):
        return {text for part in value for text in _texts(part)}
    return set()


class ReasoningTask:
    """One reasoning-gym data set with its parameters.

    ``parameters`` is a JSON object of the data set's own configuration fields; ``seed`` is 0 unless given. Without a
    sandbox its strings must be among the data set's defaults, because some generators evaluate them. Raises
    ``UserError`` on an unknown name, on parameters that the data set refuses, and on another version (rule 1).
    """

    def __init__(self, name: str, parameters: str, version: str, *, sandboxed: bool) -> None:
        data_set = check_name(name, sandboxed=sandboxed)
        task_versions.check_gym(version)
        if data_set.scorer in (Scorer.ARITHMETIC, Scorer.EXPRESSION):
            task_versions.check(task_versions.ALGEBRA)
        self.name = name
        self._scorer = data_set.scorer
        _install_shells()
        importlib.import_module(f"reasoning_gym.{data_set.module}")
        factory = importlib.import_module("reasoning_gym.factory")
        dataset_class, config_class = factory.DATASETS[name]
        self._data = dataset_class(
            _configure(name, config_class, task_versions.parameters(name, parameters), sandboxed)
        )
        self._count: int = len(self._data) if data_set.finite else MAX_ITEM + 1
        self._pickled = functools.lru_cache(maxsize=_KEPT_ENTRIES)(self._make)

    def _make(self, item: int) -> bytes:
        if not 0 <= item <= MAX_ITEM:
            raise ValueError(f"there is no item {item}")
        for attempt in range(_ATTEMPTS):
            index = (item + attempt) % self._count
            random.seed(index)
            try:
                entry = self._data[index]
            except Exception:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            # A scorer may alter its entry, so each gets a copy of its own.
            return pickle.dumps(entry)
        raise AssertionError

    def _entry(self, item: int) -> dict[str, Any]:
        entry: dict[str, Any] = pickle.loads(self._pickled(item))  # noqa: S301  our own bytes
        return entry

    @property
    def count(self) -> int:
        """How many items there are; a generator's never repeat below 2³¹."""
        return self._count

    def question(self, item: int) -> str:
        """The question of item 0…2³¹−1, the same in every process. Raises what the generator raises."""
        return str(self._entry(item)["question"])

    def score(self, item: int, response: str) -> int:
        """The reward of ``response`` in millionths, 0…1,000,000 (rule 5)."""
        answer = answer_bounds.answer_of(response)
        if answer is None:
            return 0
        entry = self._entry(item)
        if not self._may_read(answer, entry):
            return 0
        random.seed(item)
        try:
            reward = float(self._data.score_answer(answer, entry))
        except (MemoryError, RecursionError):
            raise
        except Exception:
            return 0
        return 0 if math.isnan(reward) else max(0, min(MILLION, round(reward * MILLION)))

    def _may_read(self, answer: str, entry: dict[str, Any]) -> bool:
        match self._scorer:
            case Scorer.LITERAL:
                known = (entry["answer"].strip(), *entry["metadata"].get("valid_answers", ()))
                return answer in known or answer_bounds.is_literal(answer)
            case Scorer.ARITHMETIC:
                return answer_bounds.is_arithmetic(answer)
            case Scorer.EXPRESSION:
                return answer_bounds.is_expression(answer)
            case Scorer.FRACTION:
                return answer_bounds.is_number(answer)
        return self.name not in _TRUSTS_NAN or "nan" not in answer.lower()


def _configure(name: str, config_class: type, parameters: dict[str, Any], sandboxed: bool) -> object:
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for key in parameters:
        if key not in fields:
            raise UserError(f"{name} has no parameter {key!r}{close_match(key, fields)}; it has {', '.join(fields)}")
    defaults = config_class()
    for key, least, most in (("seed", 0, MAX_ITEM), ("size", 1, MAX_SIZE)):
        number = parameters.get(key, least)
        if type(number) is not int or not least <= number <= most:
            raise UserError(f"the parameter {key} of {name} must be a whole number from {least} to {most}")
    if not sandboxed and (
        strange := _texts(parameters) - _texts(parameters.keys()) - _texts(dataclasses.asdict(defaults))
    ):
        raise UserError(
            f"the text {min(strange)!r} in the parameters of {name} is none of its defaults, so it needs a sandbox"
        )
    values = {
        key: tuple(value) if isinstance(value, list) and isinstance(getattr(defaults, key), tuple) else value
        for key, value in parameters.items()
    }
    try:
        config = config_class(**{"seed": 0, **values})
        if hasattr(config, "validate"):
            config.validate()
    except Exception as error:
        raise UserError(f"the parameters of {name} are not valid: {str(error) or type(error).__name__}") from None
    return config
