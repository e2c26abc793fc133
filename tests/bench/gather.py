"""Raw measurements of honest and forged submissions, kept in a file so that a run can go on where it was stopped.

One JSON line a submission: what made it, and a row of figures for each of its groups
(``node.workers.calibration_child``). Limits are applied later, so one run serves every choice of them. ``python -m
tests.bench.gather --help`` tells the options."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch

from node import starter
from node.starter import defaults
from node.tasks import catalogue
from node.tasks.task_messages import TaskRow
from node.workers import forger_zoo
from node.workers.calibration_child import Laboratory, Way
from node.workers.child_messages import ConfigureEngine, GenerateGroups, LoadVersion
from node.workers.forger_zoo import Job
from proofs import audit
from protocol.domain import Recipe
from protocol.work import schedule
from protocol.work.rollout import Group, Submission
from tests.node.workers import vllm_child

STARTER: Final = Path(starter.__file__).parent
BLOCK: Final = 4
"""Honest submissions of a small model that are made and measured at once: saves time, changes nothing."""
VLLM_BLOCK: Final = 8
"""Submissions that vLLM writes at once."""
UNREPLAYED: Final = ("bounds", "wrong-prompt", "termination")
"""What is found before any replay."""
CHAT: Final = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under test. ``dtype`` is the one to generate in; audits are in float32."""

    name: str
    folder: Path
    dtype: torch.dtype
    recipe: Recipe
    template: str


def subject(name: str, folder: Path | None) -> Subject:
    """The starter model, or SmolLM2 in ``folder``: "starter", "smollm2-float32" or "smollm2-bfloat16"."""
    if name == "starter":
        return Subject(name, STARTER, torch.float32, defaults.RECIPE, "{}")
    if folder is None:
        raise SystemExit("--model names the folder that tests/smollm2.py made")
    recipe = replace(
        defaults.RECIPE,
        group_size=8,
        groups_per_submission=1,
        max_prompt_tokens=128,
        max_response_tokens=48,
        learning_rate=1_000_000,
        inner_steps=8,
    )
    return Subject(name, folder, getattr(torch, name.rpartition("-")[2]), recipe, CHAT)


class Bench:
    """A subject with its laboratory and its task."""

    def __init__(self, about: Subject, *, learning_rate: int | None = None, cache: Path | None = None) -> None:
        recipe = about.recipe if learning_rate is None else replace(about.recipe, learning_rate=learning_rate)
        self.about = about
        self.task = catalogue.make(TaskRow.of({**asdict(defaults.TASKS[0]), "data": None}), sandboxed=False)
        self._items: dict[int, int] = {}
        self.asked: dict[int, str] = {}
        kept = None if cache is None else cache / f"{about.folder.name}-{recipe.learning_rate}.pt"
        small = about.name == "starter"

        def training(made: Laboratory) -> Job:
            self.laboratory = made
            return self.job("training", 0, 32 if small else 2)

        score = self.score if small else None
        self.laboratory = Laboratory(about.folder, about.dtype, recipe, training, score, kept)
        self.laboratory.stage.score = self.score

    def job(self, node: str, submission: int, groups: int | None = None) -> Job:
        """The prompts and seeds of a node's submission, as the protocol prescribes them."""
        size = self.about.recipe.groups_per_submission
        first = submission * size
        base = random.Random(node).randrange(2**30) + first
        made = self.laboratory
        empty = forger_zoo.job([()] * (size if groups is None else groups), node, first, base)
        prompts = []
        for index, seed in enumerate(empty.seeds):
            item = schedule.choose_task(seed, [1])[1]
            self._items[base + index] = item
            text = self.asked[base + index] = self.about.template.format(self.task.question(item))
            prompts.append(made.texts.encode(text, made.settings.max_prompt_tokens))
        return replace(empty, prompts=prompts)

    def score(self, number: int, tokens: Sequence[int]) -> int:
        """The task's reward of a response to the prompt of this number."""
        reward = self.task.score(self._items[number], self.laboratory.texts.decode(tokens))
        assert reward is not None
        return reward

    def rows(self, kind: str, job: Job, groups: Sequence[Group], **facts: Any) -> Iterator[dict[str, Any]]:
        """The measurements of as many submissions as ``groups`` make; ``static`` is what checks without replay say."""
        size = self.about.recipe.groups_per_submission
        parts = [slice(start, start + size) for start in range(0, len(groups), size)]
        statics = [self.static(job.number + part.start, job.prompts[part], groups[part]) for part in parts]
        looked = [
            number
            for part, static in zip(parts, statics, strict=True)
            if static not in UNREPLAYED
            for number in range(part.start, min(part.stop, len(groups)))
        ]
        seen = replace(job, prompts=[job.prompts[n] for n in looked], seeds=[job.seeds[n] for n in looked])
        measured = iter(self.laboratory.judged(seen, [groups[n] for n in looked]))
        for static in statics:
            found = [] if static in UNREPLAYED else list(islice(measured, size))
            yield {"kind": kind, "static": static, **facts, "groups": found}

    def static(self, number: int, prompts: Sequence[Sequence[int]], groups: Sequence[Group]) -> str:
        """The first of the checks without replay that fails; then the rewards; "ok" where all hold."""
        submission = Submission(bytes(32), bytes(32), bytes(32), groups[0].counter, tuple(groups))
        vocabulary = self.laboratory.model.config.vocabulary
        expected = dict(enumerate(prompts))
        found = audit.inspect(submission, expected, self.about.recipe, self.laboratory.settings.end_token, vocabulary)
        if found.reason != "ok":
            return found.reason
        for index, group in enumerate(groups):
            right = [self.score(number + index, response.tokens) for response in group.responses]
            if [response.reward for response in group.responses] != right:
                return "reward"
        return "ok"


def honest_ways(bench: Bench) -> list[Way]:
    """The ways in which an honest author works here, the quick ones more often where many submissions are asked for."""
    if bench.about.recipe.groups_per_submission == 1:
        return bench.laboratory.ways(1)
    slow = bench.laboratory.ways(32)
    quick = [way for size in (32, 16, 8, 24, 12, 32) for way in bench.laboratory.ways(size) if way.engine == "ours"]
    return [*slow, *(way for way in quick if way.at_once > 3 and way.threads == 1)]


def gather(
    bench: Bench, honest: int, forged: int, only: Sequence[str], done: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """The rows that are not ``done`` (how many of each kind) yet."""
    ways = honest_ways(bench)
    size = bench.about.recipe.groups_per_submission
    block = BLOCK if size > 1 else 1
    for number in range(done.get("honest", 0) // block * block, honest, block):
        way = ways[number // block % len(ways)]
        job = bench.job("honest node", number, block * size)
        groups = bench.laboratory.work(way, job)
        facts = {"engine": way.engine, "at_once": way.at_once, "threads": way.threads}
        yield from bench.rows("honest", job, groups, **facts)
    for number in range(forged):
        for forger in forger_zoo.ZOO:
            if (only and not any(word in forger.name for word in only)) or done.get(forger.name, 0) > number:
                continue
            job = bench.job("forger", number)
            if forger.name.startswith("cop"):
                job = replace(job, other=bench.laboratory.stage.honest(bench.job("other node", number)))
            begun = time.perf_counter()
            groups = forger.make(bench.laboratory.stage, job)
            yield from bench.rows(forger.name, job, groups, seconds=round(time.perf_counter() - begun, 3))


def by_vllm(bench: Bench, honest: int, done: int) -> Iterator[dict[str, Any]]:
    """The rows of honest submissions that vLLM writes, in a process of its own."""
    about = bench.about
    size = about.recipe.groups_per_submission
    with tempfile.TemporaryDirectory() as scratch, vllm_child.running(Path(scratch) / "cache") as engine:
        manifest, whole = bench.laboratory.store(Path(scratch))
        engine.call(
            ConfigureEngine(
                config=str(about.folder / "config.json"),
                tokenizer=str(about.folder / "tokenizer.json"),
                recipe=about.recipe,
                dtype=str(about.dtype).removeprefix("torch."),
            )
        )
        engine.call(LoadVersion(str(manifest), str(whole)))
        for number in range(done, honest, VLLM_BLOCK):
            count = min(VLLM_BLOCK, honest - number)
            job = bench.job("vllm node", number, count * size)
            prompts = [bench.asked[job.number + index] for index in range(count * size)]
            made = engine.call(GenerateGroups(prompts, list(job.seeds)))
            groups = bench.laboratory.stage.received(job, made.groups)
            yield from bench.rows("honest", job, groups, engine="vllm", at_once=count * size, threads=1)


def main() -> None:
    """Write rows until all are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=("starter", "smollm2-float32", "smollm2-bfloat16"))
    parser.add_argument("out", type=Path, help="the file of rows; what it holds is not made again")
    parser.add_argument("--model", type=Path, metavar="DIR", help="SmolLM2's folder")
    parser.add_argument("--honest", type=int, default=3000)
    parser.add_argument("--forged", type=int, default=20, help="submissions of each forger")
    parser.add_argument("--forger", action="append", default=[], help="only forgers whose names hold this")
    parser.add_argument("--vllm", action="store_true", help="only honest submissions, written by vLLM")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no submission after so many")
    parser.add_argument("--learning-rate", type=int, metavar="PICO", help="of the steps between versions")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keeps the trained versions of the weights")
    arguments = parser.parse_args()
    begun = time.monotonic()
    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    if arguments.out.exists():
        done.update(json.loads(line)["kind"] for line in arguments.out.read_text().splitlines())
    bench = Bench(
        subject(arguments.subject, arguments.model), learning_rate=arguments.learning_rate, cache=arguments.cache
    )
    with arguments.out.open("a") as file:
        made = (
            by_vllm(bench, arguments.honest, done["honest"])
            if arguments.vllm
            else gather(bench, arguments.honest, arguments.forged, arguments.forger, done)
        )
        for row in made:
            file.write(json.dumps(row) + "\n")
            file.flush()
            if time.monotonic() > begun + arguments.seconds:
                break


if __name__ == "__main__":
    main()
