"""``farflung tasks profile``: which questions are of use to a model, neither too easy nor out of its reach.

A model answers each question ``responses`` times, as inference nodes do: the same engine child, sampler, recipe and
sandboxed scoring. Of n answers to a question c are right: earn the whole reward. Then

    pass@k = 1 − C(n − c, k) / C(n, k)

is the unbiased estimate of the chance that one of k answers is right (Chen et al., https://arxiv.org/abs/2107.03374);
for k = 1 the share of right answers. The questions from ``low`` to ``high`` are kept, the bounds included.

1. The folder gets ``profile.jsonl``, with a line for each question, and for each task a set (``node.tasks.task_sets``)
   that a domain's task names as its ``set``.
2. ``profile.jsonl`` is written as it goes: a run that was interrupted goes on where it stopped, one with other bounds,
   another k or more items asks only what is missing. What the answers depend on stands in its first line; a run that
   differs in it is refused.
3. A question with an answer that cannot be decided is left out: training would drop its groups as well.
4. Seeds of the noise follow from ``seed``, task and item, so a run can be repeated.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import trio
from msgspec.structs import replace as replace_fields

from node import __version__
from node.config import MAX_SAMPLES
from node.domain import founding
from node.errors import UserError, os_errors
from node.evaluation.version_answers import (
    Progress,
    Question,
    QuestionAnswers,
    answer,
    data_blob,
    numbered,
    open_sampler,
    sampling,
)
from node.roles.engine_client import Engine, Setup
from node.store.hashing import hash_bytes
from node.tasks import task_sets
from node.tasks.task_service import Row, TaskService
from node.workers.child_process import WorkerError
from protocol.constants import MILLION
from protocol.domain import Recipe
from protocol.weights.manifest import Manifest

PROFILE: Final = "profile.jsonl"
CONTEXT: Final = b"farflung/profile/v1\0"
MAX_ITEMS: Final = 1_000_000
"""Items of a task: as many as a set can hold."""

OpenTasks = Callable[[Sequence[Row]], AbstractAsyncContextManager[TaskService]]
OpenSampler = Callable[[Setup, Recipe, int], AbstractAsyncContextManager[Engine]]


@dataclass(frozen=True, slots=True)
class Band:
    """What is kept: questions with pass@``k`` from ``low`` to ``high``."""

    k: int = 1
    low: Fraction = Fraction(1, 8)
    high: Fraction = Fraction(1, 2)

    def keeps(self, right: int, responses: int) -> bool:
        """Whether a question with ``right`` of ``responses`` answers is kept."""
        return self.low <= pass_at(self.k, right, responses) <= self.high


@dataclass(frozen=True, slots=True)
class AnsweringModel:
    """The files of the model that answers: its ``setup``, manifest and raw tensors."""

    setup: Setup
    manifest: Path
    whole: Path


@dataclass(frozen=True, slots=True)
class ProfileWanted:
    """What to ask: of each of ``tasks`` (rows of ``node.tasks.catalogue``) the ``items`` items from ``first`` on, as
    far as it has them, ``responses`` times each."""

    tasks: tuple[Row, ...]
    recipe: Recipe
    items: int = 1000
    first: int = 0
    responses: int = 16
    seed: int = 0
    band: Band = field(default_factory=Band)

    def check(self) -> None:
        """Raise ``UserError`` for what cannot be."""
        band, most = self.band, MAX_SAMPLES
        if not 1 <= self.items <= MAX_ITEMS or not 0 <= self.first < 2**31 or not 0 <= self.seed < 2**63:
            raise UserError(
                f"--items goes from 1 to {MAX_ITEMS}, --first and --seed from 0", "ask for other items or another seed"
            )
        if not 1 <= self.responses <= most:
            raise UserError(f"--responses {self.responses}: expected 1 to {most}")
        if not 1 <= band.k <= self.responses:
            raise UserError(f"-k {band.k}: expected 1 to {self.responses}, the number of responses")
        if not 0 <= band.low <= band.high <= 1:
            raise UserError(
                f"--low {float(band.low):g} --high {float(band.high):g}: expected 0 to 1, the lower one first"
            )

    def labels(self) -> list[str]:
        """What each task's set is called; a name that several have is numbered."""
        return numbered((row["name"] for row in self.tasks), "-")


@dataclass(frozen=True, slots=True)
class Profile:
    """What was found of one task: for each number of right answers how many questions have it, how many questions were
    not decided, and the items that are kept."""

    label: str
    counts: Mapping[int, int]
    undecided: int
    kept: Sequence[int]

    @property
    def questions(self) -> int:
        """Decided questions."""
        return sum(self.counts.values())


def pass_at(k: int, right: int, responses: int) -> Fraction:
    """The unbiased estimate of pass@k (see above)."""
    return 1 - Fraction(math.comb(responses - right, k), math.comb(responses, k))


# What was asked already


def header(wanted: ProfileWanted, manifest: bytes, dtype: str) -> dict[str, Any]:
    """What answers depend on; ``manifest`` is the model's."""
    recipe = asdict(wanted.recipe)
    names = ("temperature", "min_p", "max_prompt_tokens", "max_response_tokens", "target_lengths", "budget_prompt")
    return {
        "profile": 1,
        "agent": f"farflung/{__version__}",
        "model": hash_bytes(manifest).hex(),
        "dtype": dtype,
        "recipe": {name: recipe[name] for name in names},
        "responses": wanted.responses,
        "seed": wanted.seed,
        "tasks": [_described(row) for row in wanted.tasks],
    }


def _described(row: Row) -> dict[str, Any]:
    """A task without what only this machine knows."""
    data = data_blob(row)
    same = {name: row[name] for name in ("kind", "name", "parameters", "version")}
    return {**same, "data": None if data is None else data.hash.hex()}


class ProfileRecord:
    """``profile.jsonl``: how many answers to each question were right; None where one could not be decided."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.right: dict[tuple[int, int], int | None] = {}
        """By task and item."""
        self._path = path
        plain = json.loads(json.dumps(head))
        with os_errors(path, "cannot be written", "name another folder with --out"):
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            whole, rest = lines[:-1], lines[-1:]
            if any(rest) or not whole:  # the end of a line that was never finished
                path.write_bytes(b"".join(line + b"\n" for line in whole) or json.dumps(plain).encode() + b"\n")
        for number, line in enumerate(whole, 1):
            self._read(number, line, plain)

    def _read(self, number: int, line: bytes, head: Mapping[str, Any]) -> None:
        try:
            value = json.loads(line)
            if number == 1:
                different = [name for name in head if name != "agent" and value.get(name) != head[name]]
            else:
                right = value["right"]
                if right is not None and (type(right) is not int or not 0 <= right <= head["responses"]):
                    raise ValueError(right)
                self.right[int(value["task"]), int(value["item"])] = right
                different = []
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError(f"{self._path}: line {number} is no line of a profile", "name a new folder") from None
        if different:
            raise UserError(
                f"{self._path}: made with another {' and another '.join(different)}", "name a new folder with --out"
            )

    def add(self, answers: Sequence[QuestionAnswers]) -> None:
        """Keep what was answered. Raises ``UserError`` where the disk refuses."""
        lines = []
        for each in answers:
            place = each.question.task, each.question.item
            self.right[place] = None if None in each.rewards else sum(r == MILLION for r in each.rewards)
            length = round(sum(each.lengths) / len(each.lengths), 1)
            row = {"task": place[0], "item": place[1], "right": self.right[place], "length": length}
            lines.append(json.dumps(row) + "\n")
        with (
            os_errors(self._path, "cannot be written", "free some room"),
            self._path.open("a", encoding="ascii") as file,
        ):
            file.write("".join(lines))


# Asking


async def profile(
    wanted: ProfileWanted,
    model: AnsweringModel,
    out: Path,
    progress: Progress = lambda *_: None,
    *,
    open_tasks: OpenTasks = TaskService,
    open_sampler: OpenSampler = open_sampler,
) -> list[Profile]:
    """Ask what is missing in the folder ``out``, and write the sets. Raises ``UserError``.

    ``progress`` is called with how many questions are done, and of how many.
    """
    wanted.check()
    # A set that a task has is what this is to replace.
    rows = [{**row, "items": None} for row in wanted.tasks]
    recipe = sampling(wanted.recipe, wanted.responses)
    data = await trio.Path(model.manifest).read_bytes()
    record = ProfileRecord(out / PROFILE, header(wanted, data, model.setup.configured.dtype))
    try:
        async with open_tasks(rows) as tasks:
            asked = [
                (task, item)
                for task, count in enumerate(tasks.counts)
                for item in range(wanted.first, min(wanted.first + wanted.items, count))
            ]
            missing = [place for place in asked if place not in record.right]
            progress(len(asked) - len(missing), len(asked))
            if missing:
                async with open_sampler(model.setup, recipe, Manifest.parse(data).size) as sampler:
                    await sampler.load(model.manifest, model.whole)
                    questions = [Question(*place, _seed(wanted, *place)) for place in missing]
                    before = len(asked) - len(missing)

                    def told(done: int, _: int) -> None:
                        progress(before + done, len(asked))

                    await answer(sampler, tasks, questions, told, record.add)
    except WorkerError as error:
        if error.kind == "user":
            raise UserError(str(error)) from None
        raise UserError(
            f"the questions could not all be asked: {error}", "what was answered is kept: run it again to go on"
        ) from None
    found = [_profile(wanted, label, task, asked, record) for task, label in enumerate(wanted.labels())]
    for each in found:
        _write(wanted, each, out)
    return found


def _seed(wanted: ProfileWanted, task: int, item: int) -> bytes:
    return sha256(CONTEXT + wanted.seed.to_bytes(8, "big") + task.to_bytes(4, "big") + item.to_bytes(4, "big")).digest()


def _profile(
    wanted: ProfileWanted, label: str, task: int, asked: Sequence[tuple[int, int]], record: ProfileRecord
) -> Profile:
    found = {item: record.right[task, item] for number, item in asked if number == task}
    decided = {item: right for item, right in found.items() if right is not None}
    return Profile(
        label=label,
        counts=dict(sorted(Counter(decided.values()).items())),
        undecided=len(found) - len(decided),
        kept=[item for item, right in decided.items() if wanted.band.keeps(right, wanted.responses)],
    )


def set_file(found: Profile, out: Path) -> Path:
    """Where the set of a task is written."""
    return out / f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in found.label)}.txt"


def _write(wanted: ProfileWanted, found: Profile, out: Path) -> None:
    """The set; none where nothing is kept, and none of an earlier run either."""
    path, band = set_file(found, out), wanted.band
    about = [
        f"{found.label}: {len(found.kept)} of {found.questions} questions, pass@{band.k} of {wanted.responses} answers",
        f"from {float(band.low):g} to {float(band.high):g}. Made by farflung/{__version__} tasks profile.",
    ]
    with os_errors(path, "cannot be written", "free some room"):
        if found.kept:
            path.write_text(task_sets.text(found.kept, about), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)


# The model


@asynccontextmanager
async def converted(folder: Path, setup: Setup, scratch: Path) -> AsyncIterator[AnsweringModel]:
    """A Hugging Face folder as a version, in a folder below ``scratch`` that goes with the block. Raises ``UserError``.

    ``setup`` lacks the paths of the model's files.
    """
    size = _weight_bytes(folder)
    try:
        with tempfile.TemporaryDirectory(prefix="model-", dir=scratch) as name:
            whole, manifest = Path(name) / "whole.bin", Path(name) / "manifest"
            files = await founding.convert_model(folder, whole, setup.configured.dtype, size)
            made = await trio.to_thread.run_sync(founding.described, files, whole)
            manifest.write_bytes(made.encode())
            configured = replace_fields(setup.configured, config=files.config, tokenizer=files.tokenizer)
            yield AnsweringModel(replace(setup, configured=configured), manifest, whole)
    except WorkerError as error:
        raise UserError(f"{folder}: {str(error).removeprefix('engine: convert: ')}", "name another folder") from None
    except OSError as error:
        raise UserError(f"{scratch}: cannot be written ({error.strerror})", "name another folder with --out") from None


def _weight_bytes(folder: Path) -> int:
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: there is no {name} in it", "name a Hugging Face model's folder")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
