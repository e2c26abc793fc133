"""Raw measurements of honest and forged submissions, kept in a file so that a run can go on where it was stopped.

One JSON line a submission: what made it, and for each of its groups the tokens, every positive deficit (micro, not
clipped), the largest error of a log-probability, and the comparison of the activations. Limits are applied later, so
one run serves every choice of them. ``python -m tests.bench.gather --help`` tells the options.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch

from node import starter
from node.starter import defaults
from node.tasks import catalogue
from node.workers import engine, transformers_engine, zoo
from node.workers.engine import Settings, Texts, Written, measure
from node.workers.model import CausalLM, read_config
from node.workers.weights import load_into, read_safetensors
from node.workers.zoo import Job, Stage, claim_of
from proofs import audit
from proofs.checks import GroupReplay
from protocol import schedule
from protocol.constants import MILLION
from protocol.domain import Recipe
from protocol.rollout import Group, Submission

STARTER: Final = Path(starter.__file__).parent
BLOCK: Final = 4
"""Honest submissions of a small model that are made and measured at once: saves time, changes nothing."""
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
    """A subject with the versions of its weights, its task, and a way to measure what authors send."""

    def __init__(self, about: Subject, *, learning_rate: int | None = None) -> None:
        self.about = about
        recipe = about.recipe if learning_rate is None else replace(about.recipe, learning_rate=learning_rate)
        config = read_config(about.folder / "config.json")
        self.config: dict[str, Any] = json.loads((about.folder / "config.json").read_text())
        base = CausalLM(config).requires_grad_(False)
        load_into(base, read_safetensors(about.folder))
        base = base.to(about.dtype)
        self.texts = Texts(about.folder / "tokenizer.json", config)
        self.settings = Settings.of(recipe, config)
        self.task = catalogue.make({**asdict(defaults.TASKS[0]), "data": None}, sandboxed=False)
        self._items: dict[int, int] = {}
        learning = self.job("training", 0, 32 if about.name == "starter" else 4)
        score = self.score if about.name == "starter" else None
        versions = zoo.aged(base, learning, self.settings, recipe, score, 3)
        self.model = versions[3]
        self.stage = Stage(self.model, self.settings, versions[2], versions[0], self.score)
        self.judge = CausalLM(config).requires_grad_(False)
        self.judge.load_state_dict(self.model.float().state_dict() if about.dtype != torch.float32 else self.model.state_dict())
        self.model.to(about.dtype)
        self._second: Any = None

    def job(self, node: str, submission: int, groups: int | None = None) -> Job:
        """The prompts and seeds of a node's submission, as the protocol prescribes them."""
        count = self.about.recipe.groups_per_submission if groups is None else groups
        ids = [sha256(part.encode()).digest() for part in ("domain", "weights", node)]
        first = submission * self.about.recipe.groups_per_submission
        seeds = [schedule.seed(ids[0], ids[1], ids[2], counter) for counter in range(first, first + count)]
        prompts = []
        base = random.Random(node).randrange(2**30) + first  # noqa: S311 (an index, not a secret)
        for index, seed in enumerate(seeds):
            item = schedule.choose_task(seed, [1])[1]
            self._items[base + index] = item
            text = self.about.template.format(self.task.question(item))
            prompts.append(self.texts.encode(text, self.settings.max_prompt_tokens))
        return Job(prompts, seeds, first, base)

    def score(self, number: int, tokens: Sequence[int]) -> int:
        """The task's reward of a response to the prompt of this number."""
        return self.task.score(self._items[number], self.texts.decode(tokens))

    def second(self) -> Any:
        """The transformers model with the same weights."""
        if self._second is None:
            self._second = transformers_engine.build(self.model, self.config)
        return self._second

    def rows(self, kind: str, job: Job, groups: Sequence[Group], **facts: Any) -> Iterator[dict[str, Any]]:
        """The measurements of as many submissions as ``groups`` make; ``static`` is what checks without replay say."""
        size = self.about.recipe.groups_per_submission
        parts = [slice(start, start + size) for start in range(0, len(groups), size)]
        statics = [self.static(job.number + part.start, job.prompts[part], groups[part]) for part in parts]
        looked = [part for part, static in zip(parts, statics, strict=True) if static not in UNREPLAYED]
        claims = [claim_of(s, g) for part in looked for s, g in zip(job.seeds[part], groups[part], strict=True)]
        measured = iter(measure(self.judge, claims, self.settings) if claims else ())
        for static in statics:
            row: dict[str, Any] = {"kind": kind, "static": static, **facts, "groups": []}
            for found in () if static in UNREPLAYED else islice(measured, size):
                deficits = found.deficits[found.deficits > 0].double() * MILLION
                row["groups"].append(
                    {
                        "tokens": len(found.deficits),
                        "deficits": [round(value, 1) for value in deficits.tolist()],
                        "logprob_error": int(found.logprob_errors.max()),
                        "activations": list(asdict(found.activations).values()),
                    }
                )
            yield row

    def static(self, number: int, prompts: Sequence[Sequence[int]], groups: Sequence[Group]) -> str:
        """The first of the checks without replay that fails; then the rewards; "ok" where all hold."""
        submission = Submission(bytes(32), bytes(32), bytes(32), groups[0].counter, tuple(groups))
        vocabulary = self.model.config.vocabulary
        expected = dict(enumerate(prompts))
        found = audit.inspect(submission, expected, self.about.recipe, self.settings.end_token, vocabulary)
        if found.reason != "ok":
            return found.reason
        for index, group in enumerate(groups):
            right = [self.score(number + index, response.tokens) for response in group.responses]
            if [response.reward for response in group.responses] != right:
                return "reward"
        return "ok"


def replays(row: dict[str, Any], clip: int) -> list[GroupReplay]:
    """What an audit with this ``deficit_clip`` (micro) sees of a kept row."""
    found = []
    for group in row["groups"]:
        shares = sum(-int(-min(value / clip, 1.0) * MILLION // 1) for value in group["deficits"])
        found.append(
            GroupReplay(
                group["tokens"], len(group["deficits"]), shares, group["logprob_error"], *group["activations"]
            )
        )
    return found


def honest_ways(bench: Bench) -> list[tuple[str, int, int, Callable[[Job], list[Group]]]]:
    """(engine, groups made at once, threads, make) of the ways in which an honest author works here."""

    def ours(at_once: int) -> Callable[[Job], list[Group]]:
        def make(job: Job) -> list[Group]:
            parts: list[list[Written]] = []
            for start in range(0, len(job.prompts), at_once):
                part = slice(start, start + at_once)
                parts += engine.generate(bench.model, job.prompts[part], job.seeds[part], bench.settings)
            return bench.stage.groups(job, parts)

        return make

    def theirs(job: Job) -> list[Group]:
        written = transformers_engine.generate(bench.second(), job.prompts, job.seeds, bench.settings)
        return bench.stage.groups(job, written)

    ways = [("ours", 32, 1, ours(32)), ("ours", 1, 1, ours(1)), ("transformers", 1, 1, theirs)]
    if bench.about.recipe.groups_per_submission > 1:
        ways += [("ours", 8, 1, ours(8)), ("ours", 3, 2, ours(3)), ("ours", 32, 2, ours(32))]
    return ways


def gather(
    bench: Bench, honest: int, forged: int, only: Sequence[str], done: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """The rows that are not ``done`` (how many of each kind) yet."""
    ways = honest_ways(bench)
    size = bench.about.recipe.groups_per_submission
    block = BLOCK if size > 1 else 1
    for number in range(done.get("honest", 0) // block * block, honest, block):
        name, at_once, threads, make = ways[number // block % len(ways)]
        torch.set_num_threads(threads)
        job = bench.job("honest node", number, block * size)
        groups = make(job)
        torch.set_num_threads(1)
        yield from bench.rows("honest", job, groups, engine=name, at_once=at_once, threads=threads)
    for number in range(forged):
        for forger in zoo.ZOO:
            if (only and not any(word in forger.name for word in only)) or done.get(forger.name, 0) > number:
                continue
            job = bench.job("forger", number)
            if forger.name.startswith("cop"):
                job = replace(job, other=bench.stage.honest(bench.job("other node", number)))
            begun = time.perf_counter()
            groups = forger.make(bench.stage, job)
            yield from bench.rows(forger.name, job, groups, seconds=round(time.perf_counter() - begun, 3))


def main() -> None:
    """Write rows until all are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=("starter", "smollm2-float32", "smollm2-bfloat16"))
    parser.add_argument("out", type=Path, help="the file of rows; what it holds is not made again")
    parser.add_argument("--model", type=Path, metavar="DIR", help="SmolLM2's folder")
    parser.add_argument("--honest", type=int, default=3000)
    parser.add_argument("--forged", type=int, default=20, help="submissions of each forger")
    parser.add_argument("--forger", action="append", default=[], help="only forgers whose names hold this")
    parser.add_argument("--learning-rate", type=int, metavar="PICO", help="of the steps between versions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    if arguments.out.exists():
        done.update(json.loads(line)["kind"] for line in arguments.out.read_text().splitlines())
    bench = Bench(subject(arguments.subject, arguments.model), learning_rate=arguments.learning_rate)
    with arguments.out.open("a") as file:
        for row in gather(bench, arguments.honest, arguments.forged, arguments.forger, done):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
