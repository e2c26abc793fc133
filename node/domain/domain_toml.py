"""``domain.toml``: what a founder writes down about a new domain, in the units that people use.

::

    name = "arithmetic"
    model = "path/to/model"        # Hugging Face folder: config.json, tokenizer.json, *.safetensors
    electors = ["12D3KooW…"]       # peer ids or node ids (64 hex digits); the founder where left out
    validators = ["12D3KooW…"]     # those whose verdicts count from the start
    private = true                 # weights travel encrypted, to nodes that joined; false where left out
    calibration = "calibration.json"  # of farflung proofs calibrate: dtype and thresholds; float32's where left out

    [[task]]                       # as in docs/OPERATING.md, "Tasks"; paths are relative to this file
    name = "chain_sum"

    [recipe]                       # plain numbers: temperature = 1.0, learning_rate = 3e-4
    [timings]                      # seconds: presence = 5, epoch = 10
    [policy]                       # counts and shares: min_nodes = 4, audit_share = 0.5
    [thresholds]                   # plain numbers

1. Everything but ``name``, ``model`` and the tasks has a default, which docs/OPERATING.md lists.
2. Numbers are read as decimals and must be whole in the genesis' unit (millionths, 10⁻¹², milliseconds): nothing is
   rounded behind its author's back.
3. A mistake is one line that names file, line, key and remedy.
4. Without named validators anybody may validate; with them, others need the reputation that the policy asks for.
5. ``target_lengths`` is a list of numbers of tokens, or the name of one of ``PRESETS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TypeVar

from node.config import toml_line, toml_table
from node.domain import task_tables
from node.errors import UserError
from node.starter import defaults
from node.store.durable_files import read_text
from proofs.checks import FLOAT32_THRESHOLDS
from protocol import codec
from protocol.codec import Array, Int, Many, Text
from protocol.constants import MILLION
from protocol.domain import (
    DTYPES,
    MAX_ELECTORS,
    MAX_NAMED_TRAINERS,
    MAX_NAMED_VALIDATORS,
    Admission,
    Part,
    Policy,
    Recipe,
    Thresholds,
    Timings,
    default_admission,
    default_timings,
)
from protocol.errors import PeerError
from protocol.identity import node_id

AUDIT_SHARE: Final = MILLION // 16
"""The least share of a submission's groups that is replayed, of authors who were right in 158 submissions in a row."""
EARNED_REPUTATION: Final = 900_000
"""What others need beside named validators: eight accepted submissions and no false one."""
MAX_TASKS: Final = 64

Path_ = tuple[str | int, ...]
"""Where a value stands in the file: keys, and indices from 0 of a section that repeats."""

P = TypeVar("P", bound=Part)


@dataclass(frozen=True, slots=True)
class Unit:
    """How a number of the genesis is written by people: ``scale`` of the genesis' units make one of theirs."""

    scale: int
    words: str


COUNT: Final = Unit(1, "an integer")
NUMBER: Final = Unit(MILLION, "a number")
RATE: Final = Unit(10**12, "a number")
SECONDS: Final = Unit(1000, "seconds")

PRESETS: Final = {
    "TARGET-SHORT": (1000, 2000, 3000, 4000),
    "TARGET-LONG": (2000, 4000, 6000, 8000, 10_000),
}
"""Target lengths by name (INTELLECT-2, https://arxiv.org/abs/2505.07291)."""

_RECIPE: Final = {
    "temperature": NUMBER,
    "min_p": NUMBER,
    "clip_low": NUMBER,
    "clip_high": NUMBER,
    "clip_max": NUMBER,
    "importance_max": NUMBER,
    "learning_rate": RATE,
    "weight_decay": NUMBER,
    "grad_clip": NUMBER,
    "entropy": NUMBER,
    "kl": NUMBER,
    "length_penalty": NUMBER,
}


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the file and the part of the genesis that it stands for: key → (field, unit)."""

    part: type[Part]
    keys: Mapping[str, tuple[str, Unit]]


SECTIONS: Final = {
    "recipe": Section(Recipe, {f.name: (f.name, _RECIPE.get(f.name, COUNT)) for f in fields(Recipe)}),
    "timings": Section(Timings, {f.name.removesuffix("_ms"): (f.name, SECONDS) for f in fields(Timings)}),
    "policy": Section(
        Policy,
        {
            "min_nodes": ("min_nodes", COUNT),
            "relays_min": ("relays_min", COUNT),
            "relays_share": ("relays_per_million", NUMBER),
            "validators_min": ("validators_min", COUNT),
            "validators_share": ("validators_per_million", NUMBER),
            "validator_reputation": ("validator_reputation", NUMBER),
            "audit_share": ("audit_share", NUMBER),
        },
    ),
    "thresholds": Section(Thresholds, {f.name: (f.name, NUMBER) for f in fields(Thresholds)}),
    "admission": Section(Admission, {f.name: (f.name, COUNT) for f in fields(Admission)}),
}
KEYS: Final = (
    *("name", "model", "electors", "validators", "trainers", "private", "calibration", "task"),
    *SECTIONS,
)


@dataclass(frozen=True, slots=True)
class Founding:
    """What a new domain is to be.

    ``model`` is a Hugging Face folder, ``tasks`` a task table (``node.tasks.catalogue``), ``electors`` node ids, empty
    for the creator alone, ``admission`` None for the default, ``dtype`` what nodes generate in. ``private``: weights
    travel encrypted, between nodes that joined. ``model_where`` is what a message about the model begins with,
    ``notes`` say what was left out of files.
    """

    name: str
    devnet: bool
    model: Path
    tasks: tuple[Mapping[str, Any], ...]
    recipe: Recipe
    timings: Timings
    policy: Policy
    thresholds: Thresholds = FLOAT32_THRESHOLDS
    dtype: str = "float32"
    electors: tuple[bytes, ...] = ()
    validators: tuple[bytes, ...] = ()
    trainers: tuple[bytes, ...] = ()
    admission: Admission | None = None
    private: bool = False
    model_where: str = "the model"
    notes: tuple[str, ...] = ()


def new_policy(min_nodes: int, validator_reputation: int) -> Policy:
    """The policy that a new domain starts from."""
    return Policy(
        min_nodes=min_nodes,
        relays_min=1,
        relays_per_million=100_000,
        validators_min=1,
        validators_per_million=100_000,
        validator_reputation=validator_reputation,
        audit_share=AUDIT_SHARE,
    )


def load(path: Path) -> Founding:
    """Read ``path``, and convert the question files that it names. Raises ``UserError``."""
    return parse(read_text(path, "name a domain.toml"), path)


def parse(text: str, path: Path) -> Founding:
    """The domain described in ``text``; ``path`` is the file it came from. Raises ``UserError``."""
    return _DomainReader(toml_table(text, path, Decimal), text, path).read()


class _DomainReader:
    def __init__(self, table: dict[str, Any], text: str, path: Path) -> None:
        self.table = table
        self.text = text
        self.path = path

    def read(self) -> Founding:
        self._known((), self.table, KEYS)
        name, model = self._text("name"), self._text("model")
        if len(name) > 64 or not name.isascii() or not name.isprintable():
            raise self._error(("name",), "a name is 1 to 64 printable ASCII characters", "choose another")
        electors = tuple(sorted(self._nodes(("electors",), MAX_ELECTORS)))
        validators = tuple(sorted(self._nodes(("validators",), MAX_NAMED_VALIDATORS)))
        private = self._private()
        dtype, limits = self._calibration()
        policy = self._section("policy", new_policy(4, EARNED_REPUTATION if validators else 0))
        if not validators and policy.validator_reputation > 0:
            raise self._error(
                ("policy", "validator_reputation"),
                "nobody could earn it, for nobody could validate",
                "name validators = […], or set it to 0",
            )
        tasks = self._tasks()
        return Founding(
            name=name,
            devnet=False,
            model=self.path.absolute().parent / model,
            model_where=self._where(("model",)),
            electors=electors,
            validators=validators,
            trainers=self._nodes(("trainers",), MAX_NAMED_TRAINERS),
            admission=self._admission(private),
            private=private,
            tasks=tuple(row for row, _ in tasks),
            recipe=self._recipe(),
            timings=self._section("timings", default_timings(devnet=False)),
            policy=policy,
            thresholds=self._section("thresholds", limits),
            dtype=dtype,
            notes=tuple(note for _, notes in tasks for note in notes),
        )

    # Parts

    def _text(self, key: str) -> str:
        value = self.table.get(key)
        if value is None:
            example = {"name": 'name = "my-domain"', "model": 'model = "path/to/model"'}[key]
            raise UserError(f"{self.path}: {key} is missing", f"add {example} at the top")
        if not isinstance(value, str) or not value:
            raise self._error((key,), "expected a text", f'write {key} = "…"')
        return value

    def _private(self) -> bool:
        value = self.table.get("private", False)
        if not isinstance(value, bool):
            raise self._error(("private",), "expected true or false", "write private = true, or delete the line")
        return value

    def _calibration(self) -> tuple[str, Thresholds]:
        """The dtype and the limits of the calibration that the file names."""
        if "calibration" not in self.table:
            return "float32", FLOAT32_THRESHOLDS
        path = self.path.absolute().parent / self._text("calibration")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            names = [name for name, _ in Thresholds.SCHEMA]
            limits = Thresholds.from_value([found["thresholds"][name] for name in names])
            dtype = found["dtype"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise self._error(
                ("calibration",), f"{path} is no calibration ({error})", "farflung proofs calibrate makes one"
            ) from None
        if dtype not in DTYPES or not codec.fits(limits.to_value(), Array(Thresholds.SCHEMA)):
            raise self._error(("calibration",), f"{path} holds a value that no domain can have", "calibrate again")
        return dtype, limits

    def _admission(self, private: bool) -> Admission | None:
        """None where the file does not say it: then it follows from whether the domain is private."""
        if "admission" not in self.table:
            return None
        return self._section("admission", default_admission(devnet=False, private=private))

    def _nodes(self, where: tuple[str, ...], most: int) -> tuple[bytes, ...]:
        """The nodes that are listed there, in their order."""
        (key,) = where
        value = self.table.get(key, [])
        if not isinstance(value, list) or len(value) > most:
            raise self._error(where, f"expected a list of at most {most} nodes", f'write {key} = ["12D3KooW…"]')
        if key == "electors" and key in self.table and not value:
            raise self._error(where, "a domain needs an elector", "name one, or delete the line for the founder")
        nodes = []
        for item in value:
            if isinstance(item, str) and re.fullmatch(r"[0-9a-fA-F]{64}", item):
                nodes.append(bytes.fromhex(item))
                continue
            try:
                nodes.append(node_id(item if isinstance(item, str) else ""))
            except PeerError:
                raise self._error(
                    where, f"{item!r} is neither a peer id nor a node id", "farflung identity show tells both"
                ) from None
        if len(set(nodes)) != len(nodes):
            raise self._error(where, "a node is named twice", "name it once")
        return tuple(nodes)

    def _tasks(self) -> list[tuple[dict[str, Any], list[str]]]:
        tasks = self.table.get("task", [])
        if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
            raise self._error(("task",), "expected [[task]] sections", "see docs/OPERATING.md, Tasks")
        if not 1 <= len(tasks) <= MAX_TASKS:
            raise UserError(
                f"{self.path}: {len(tasks)} tasks, expected 1 to {MAX_TASKS}", 'add [[task]] with name = "chain_sum"'
            )
        folder = self.path.absolute().parent
        return [task_tables.row(_plain(task), folder, self._where(("task", index))) for index, task in enumerate(tasks)]

    def _section(self, name: str, base: P) -> P:
        section, schema = SECTIONS[name], dict(base.SCHEMA)
        table = self.table.get(name, {})
        if not isinstance(table, dict):
            raise self._error((name,), "expected a section", f"write [{name}]")
        self._known((name,), table, tuple(section.keys))
        values = {field.name: getattr(base, field.name) for field in fields(base)}
        for key, value in table.items():
            field, unit = section.keys[key]
            limits = schema[field]
            if isinstance(limits, Int):
                values[field] = self._number((name, key), value, unit, limits)
            elif isinstance(limits, Many):
                values[field] = self._lengths((name, key), value, limits)
            else:
                assert isinstance(limits, Text)
                values[field] = self._word((name, key), value, limits)
        return type(base)(**values)

    def _recipe(self) -> Recipe:
        recipe = self._section("recipe", defaults.RECIPE)
        if (problem := recipe.problem()) is not None:
            raise self._error(("recipe",), problem, "see docs/OPERATING.md, A domain of your own")
        return recipe

    def _lengths(self, where: Path_, value: object, limits: Many) -> tuple[int, ...]:
        if isinstance(value, str) and value in PRESETS:
            return PRESETS[value]
        inner = limits.schema
        assert isinstance(inner, Int)
        if not isinstance(value, list) or len(value) > limits.most:
            expected = f"a list of at most {limits.most} lengths, or {' or '.join(PRESETS)}"
            raise self._error(where, f"expected {expected}", "correct the value or delete the line")
        return tuple(self._number(where, item, COUNT, inner) for item in value)

    def _word(self, where: Path_, value: object, limits: Text) -> str:
        expected = f"a printable ASCII text of at most {limits.most} characters"
        if limits.choices is not None:
            expected = f"one of {', '.join(limits.choices)}"
        if not isinstance(value, str) or not codec.fits(value, limits):
            raise self._error(where, f"expected {expected}", "correct the value or delete the line")
        return value

    def _number(self, where: Path_, value: object, unit: Unit, limits: Int) -> int:
        low, high = (_shown(bound, unit) for bound in (limits.low, limits.high))
        expected = f"expected {unit.words} from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            raise self._error(where, expected, "correct the value or delete the line")
        number = Decimal(value)
        # The first bound keeps the product below what a decimal can hold.
        if not number.is_finite() or abs(number) > limits.high or not limits.low <= number * unit.scale <= limits.high:
            raise self._error(where, expected, "correct the value or delete the line")
        scaled = number * unit.scale
        if scaled != int(scaled):
            step = f"a multiple of {_shown(1, unit)}" if unit.scale > 1 else "a whole number"
            raise self._error(where, f"expected {step}", "round it")
        return int(scaled)

    # Mistakes

    def _known(self, where: Path_, table: Mapping[str, Any], known: Sequence[str]) -> None:
        for key in table:
            if key not in known:
                raise self._error((*where, key), "unknown key", f"known keys are {', '.join(known)}")

    def _where(self, where: Path_) -> str:
        line = toml_line(self.text, where)
        at = "" if line is None else f" line {line}:"
        words = [str(part + 1) if isinstance(part, int) else part for part in where]
        name = " ".join(words) if any(isinstance(part, int) for part in where) else ".".join(words)
        return f"{self.path}:{at} {name}"

    def _error(self, where: Path_, problem: str, remedy: str) -> UserError:
        return UserError(f"{self._where(where)}: {problem}", remedy)


def _shown(value: int, unit: Unit) -> str:
    """A number of the genesis in people's unit, without needless digits."""
    text = f"{Decimal(value) / unit.scale:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _plain(value: Any) -> Any:
    """``value`` with its decimals as floating-point numbers, as a task's parameters hold them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, Decimal) else value
