"""Which questions are kept, and how a profile that was interrupted goes on. The children are stand-ins;
``cli/test_tasks_profile`` has real ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from node.errors import UserError
from node.evaluation import difficulty
from node.evaluation.difficulty import AnsweringModel, Band, Profile, ProfileWanted, pass_at
from node.evaluation.version_answers import SEQUENCES, Progress
from node.roles.engine_client import Setup
from node.tasks import task_sets
from node.workers.child_messages import ConfigureEngine, WrittenGroup, WrittenGroups, WrittenResponse
from node.workers.child_process import WorkerError
from protocol.domain import Recipe
from tests.node.fake_children import WHOLE_0, manifest_of
from tests.protocol.builders import RECIPE

ROW = {
    "kind": "reasoning-gym",
    "name": "sums",
    "weight": 1,
    "parameters": "{}",
    "version": "0.1.25",
    "data": None,
    "items": None,
}
WANTED = ProfileWanted((ROW,), RECIPE, items=40, responses=4)


def test_the_estimate_is_the_mean_over_all_choices_of_k_answers() -> None:
    for responses in range(1, 7):
        for right in range(responses + 1):
            answers = [True] * right + [False] * (responses - right)
            for k in range(1, responses + 1):
                chosen = list(itertools.combinations(answers, k))
                assert pass_at(k, right, responses) == Fraction(sum(map(any, chosen)), len(chosen))


def test_the_bounds_are_kept() -> None:
    band = Band(1, Fraction("0.25"), Fraction("0.5"))
    assert [band.keeps(right, 8) for right in range(9)] == [False, False, True, True, True, False, False, False, False]
    # A tenth is no binary fraction: 1 of 10 is in the band all the same.
    assert Band(1, Fraction("0.1"), Fraction("0.1")).keeps(1, 10)
    assert Band(2, Fraction(0), Fraction(1, 2)).keeps(1, 4)
    assert not Band(2, Fraction(0), Fraction("0.49")).keeps(1, 4)


TEN_AT_ONCE = replace(RECIPE, group_size=SEQUENCES // 10)


@dataclass
class Children:
    """What writes and scores answers, ten questions at a time. Item n is answered right n mod 5 times of 4; of item 13
    nothing can be decided. ``dies`` after so many calls."""

    counts: tuple[int, ...] = (2**31,)
    asked: list[tuple[int, int]] = field(default_factory=list)
    """(task, item) of every question that was answered."""
    seeds: set[bytes] = field(default_factory=set)
    loads: int = 0
    calls: int = 0
    dies: int = -1
    rows: list[Any] = field(default_factory=list)
    recipe: Recipe = TEN_AT_ONCE

    async def load(self, manifest: Path, whole: Path) -> None:
        self.loads += 1

    async def questions(self, items: Sequence[tuple[int, int]]) -> list[str]:
        return [f"{task} {item}" for task, item in items]

    async def generate(self, prompts: Sequence[str], seeds: Sequence[bytes]) -> WrittenGroups:
        if self.calls == self.dies:
            raise WorkerError("engine: generate: the child was ended by signal SIGKILL", "died")
        self.calls += 1
        self.seeds.update(seeds)
        for prompt in prompts:
            task, item = prompt.split()[:2]
            self.asked.append((int(task), int(item)))
        responses = [WrittenResponse(bytes(4), bytes(4), 1, str(number)) for number in range(4)]
        return WrittenGroups([WrittenGroup(b"", responses, b"") for _ in prompts], 0, 0.0)

    async def score(self, items: Sequence[tuple[int, int, str]]) -> list[int | None]:
        return [self._reward(item, int(text)) for _, item, text in items]

    def _reward(self, item: int, number: int) -> int | None:
        if item == 13:
            return (1_000_000, None, 0, 0)[number]
        return 1_000_000 if number < item % 5 else 200_000  # partial credit is not right

    async def profile(
        self, wanted: ProfileWanted, model: AnsweringModel, out: Path, *progress: Progress
    ) -> list[Profile]:
        """The profile that these make."""

        @asynccontextmanager
        async def service(rows: Sequence[Any]) -> AsyncIterator[Any]:
            self.rows = list(rows)
            yield self

        @asynccontextmanager
        async def sampler(*_: Any) -> AsyncIterator[Any]:
            yield self

        return await difficulty.profile(wanted, model, out, *progress, open_tasks=service, open_sampler=sampler)


@pytest.fixture
def children() -> Children:
    return Children()


@pytest.fixture
def model(tmp_path: Path) -> AnsweringModel:
    manifest = tmp_path / "manifest"
    manifest.write_bytes(manifest_of(WHOLE_0).encode())
    return AnsweringModel(Setup(ConfigureEngine("", "", RECIPE), "torch", tmp_path), manifest, tmp_path / "whole")


async def test_the_set_holds_what_lies_in_the_band(children: Children, model: AnsweringModel, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    out = tmp_path / "out"
    wanted = replace(WANTED, tasks=({**ROW, "items": b"an older set"},))
    (found,) = await children.profile(wanted, model, out, lambda *done: told.append(done))
    assert told == [(0, 40), (10, 40), (20, 40), (30, 40), (40, 40)]
    # 1 or 2 of 4 answers are right; the undecidable is left out, and a set that is to be replaced counts for nothing.
    assert found.kept == [item for item in range(40) if item % 5 in (1, 2) and item != 13]
    assert (found.undecided, found.questions) == (1, 39)
    assert found.counts == {0: 8, 1: 8, 2: 8, 3: 7, 4: 8}
    assert task_sets.read(out / "sums.txt").items == tuple(found.kept)
    assert [row["items"] for row in children.rows] == [None]
    assert len(children.seeds) == 40


async def test_it_goes_on_where_it_stopped(children: Children, model: AnsweringModel, tmp_path: Path) -> None:
    children.dies = 2
    with pytest.raises(UserError, match=r"could not all be asked: .* run it again to go on"):
        await children.profile(WANTED, model, tmp_path / "out")
    record = tmp_path / "out" / "profile.jsonl"
    assert len(record.read_text().splitlines()) == 21
    # The machine went off in the midst of a line.
    record.write_bytes(record.read_bytes()[:-5])
    children.dies = -1
    (found,) = await children.profile(WANTED, model, tmp_path / "out")
    assert [item for _, item in children.asked] == [*range(20), *range(19, 40)]
    whole = await children.profile(WANTED, model, tmp_path / "another")
    assert whole == [found]
    assert (tmp_path / "another" / "profile.jsonl").read_bytes() == record.read_bytes()


async def test_other_bounds_ask_nothing_and_more_items_only_those(
    children: Children, model: AnsweringModel, tmp_path: Path
) -> None:
    await children.profile(WANTED, model, tmp_path)
    loads, asked = children.loads, len(children.asked)
    easy = replace(WANTED, band=Band(1, Fraction(1), Fraction(1)))
    (found,) = await children.profile(easy, model, tmp_path)
    assert found.kept == list(range(4, 40, 5))
    assert (children.loads, len(children.asked)) == (loads, asked)
    nothing = replace(WANTED, band=Band(1, Fraction("0.9"), Fraction("0.9")))
    (found,) = await children.profile(nothing, model, tmp_path)
    assert found.kept == []
    assert not (tmp_path / "sums.txt").exists()
    (found,) = await children.profile(replace(WANTED, items=45), model, tmp_path)
    assert [item for _, item in children.asked[asked:]] == [40, 41, 42, 43, 44]
    assert found.questions == 44


async def test_a_task_with_few_items_is_asked_for_these(
    children: Children, model: AnsweringModel, tmp_path: Path
) -> None:
    children.counts = (7, 2**31)
    both = replace(WANTED, tasks=(ROW, ROW), items=9, first=3)
    first, second = await children.profile(both, model, tmp_path)
    assert children.asked == [
        *((0, n) for n in range(3, 7)),
        *((1, n) for n in range(3, 12)),
    ]
    assert [difficulty.set_file(each, tmp_path).name for each in (first, second)] == ["sums.txt", "sums-2.txt"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"responses": 8}, "made with another responses"),
        ({"seed": 1}, "made with another seed"),
        ({"recipe": replace(RECIPE, temperature=1), "seed": 2}, "made with another recipe and another seed"),
        ({"tasks": ({**ROW, "parameters": '{"a": 1}'},)}, "made with another tasks"),
    ],
)
async def test_what_answers_depend_on_must_be_the_same(
    children: Children, model: AnsweringModel, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    await children.profile(WANTED, model, tmp_path)
    with pytest.raises(UserError, match=words):
        await children.profile(replace(WANTED, **changes), model, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '{"task": 0, "item": "x", "right": 1}',
        '{"item": 0, "right": 1}',
        '{"task": 0, "item": 0, "right": 99}',
    ],
)
async def test_a_file_that_is_no_profile_is_told(
    children: Children, model: AnsweringModel, tmp_path: Path, line: str
) -> None:
    await children.profile(WANTED, model, tmp_path)
    with (tmp_path / "profile.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match="line 42 is no line of a profile"):
        await children.profile(WANTED, model, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"items": 0}, "--items goes from 1"),
        ({"first": -1}, "--first and --seed from 0"),
        ({"responses": 257}, "--responses 257: expected 1 to 256"),
        ({"band": Band(5)}, "-k 5: expected 1 to 4, the number of responses"),
        ({"band": Band(1, Fraction(1), Fraction(0))}, "--low 1 --high 0"),
        ({"band": Band(1, Fraction(0), Fraction(2))}, "--low 0 --high 2"),
    ],
)
def test_what_cannot_be_asked_is_told(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        replace(WANTED, **changes).check()
    assert words in str(caught.value)


def test_a_sets_name_is_a_files_name(tmp_path: Path) -> None:
    assert difficulty.set_file(Profile("a/../b c", {}, 0, []), tmp_path).name == "a_.._b_c.txt"


def test_the_records_first_line_says_what_answers_depend_on() -> None:
    head = difficulty.header(WANTED, b"manifest", "float32")
    assert json.loads(json.dumps(head))["tasks"] == [
        {"kind": "reasoning-gym", "name": "sums", "parameters": "{}", "version": "0.1.25", "data": None}
    ]
    assert head["recipe"]["temperature"] == RECIPE.temperature
