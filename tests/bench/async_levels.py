"""What asynchrony costs in reward: ``python -m tests.bench.async_levels [--json] [--plot FILE]``.

The starter model learns the starter task with the starter recipe, once for each async level and seed: step s trains on
rollouts of version max(0, s − level), every one of them as old as the recipe allows, which a real network's are not.
Prompts and noise of a step are the same for all levels. Everything is what the daemon's children use, in one process,
so that nothing but the level differs.

``curve``  the mean reward of each step's rollouts, a list for each seed, by level
``final``  the mean reward of the last version on ``HELD_OUT`` questions that no step asked, a number for each seed
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch

from node.domain import founding
from node.starter.defaults import RECIPE, TASKS
from node.tasks.reasoning_tasks import ReasoningTask
from node.workers import sharding, weight_files
from node.workers.engine_child import Texts
from node.workers.generation import SamplingSettings, generate
from node.workers.learner import Learner, TrainingSample
from node.workers.model import CausalLM
from node.workers.model_config import read_config
from node.workers.policy import TrainedPolicy
from protocol.work import schedule

LEVELS: Final = (0, 1, 2, 4)
HELD_OUT: Final = 1024


def starter() -> CausalLM:
    """The starter model, version 0."""
    model = CausalLM(read_config(founding.MODEL / "config.json"))
    weight_files.load_into(model, weight_files.read_safetensors(founding.MODEL))
    return model


class Course:
    """One run: the task, the tokenizer, and how a version writes and is rewarded."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        (task,) = TASKS
        self.task = ReasoningTask(task.name, task.parameters, task.version, sandboxed=False)
        self.config = read_config(founding.MODEL / "config.json")
        self.texts = Texts(founding.MODEL / "tokenizer.json", self.config)
        self.settings = SamplingSettings.of(RECIPE, self.config)

    def write(self, model: CausalLM, name: str, groups: int, size: int) -> list[TrainingSample]:
        """Groups of rollouts by ``model`` on prompts that only the seed and ``name`` decide."""
        seeds = [sha256(f"{self.seed} {name} {number}".encode()).digest() for number in range(groups)]
        items = [schedule.choose_task(seed, [1])[1] for seed in seeds]
        prompts = [self.texts.encode(self.task.question(item), RECIPE.max_prompt_tokens) for item in items]
        written = generate(model, prompts, seeds, replace(self.settings, group_size=size))
        return [
            TrainingSample(
                prompt,
                [one.tokens for one in group],
                [one.logprobs for one in group],
                [self.task.score(item, self.texts.decode(one.tokens)) for one in group],
            )
            for prompt, item, group in zip(prompts, items, written, strict=True)
        ]


def reward(samples: list[TrainingSample]) -> float:
    """The mean reward, 0 to 1."""
    return statistics.fmean(value / 1e6 for sample in samples for value in sample.rewards)


def run(level: int, seed: int, steps: int) -> dict[str, Any]:
    """Train ``steps`` steps with rollouts ``level`` versions old."""
    course = Course(seed)
    model = starter()
    learner = Learner(TrainedPolicy(model, RECIPE.temperature / 1e6), RECIPE, sharding.alone("cpu", sharded=False))
    writer = starter()
    versions: deque[dict[str, torch.Tensor]] = deque(maxlen=level + 1)
    curve = []
    for step in range(steps):
        versions.append({name: value.clone() for name, value in model.state_dict().items()})
        writer.load_state_dict(versions[0])
        samples = course.write(writer, f"step {step}", RECIPE.groups_per_step, RECIPE.group_size)
        curve.append(reward(samples))
        learner.train(samples)
    return {"curve": curve, "final": reward(course.write(model, "held out", HELD_OUT, 1))}


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw the curves, the mean of the seeds with their span."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for level, runs in found["curve"].items():
        columns = list(zip(*runs, strict=True))
        line = axes.plot([statistics.fmean(column) for column in columns], label=f"async level {level}")[0]
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(range(len(columns)), low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel="mean reward of the step's rollouts", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)


def main() -> None:
    """Run all levels and seeds, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="where to draw the curves; needs matplotlib")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"curve": {}, "final": {}}
    for level in LEVELS:
        runs = [run(level, seed, arguments.steps) for seed in range(arguments.seeds)]
        found["curve"][level] = [each["curve"] for each in runs]
        found["final"][level] = [each["final"] for each in runs]
        if not arguments.json:
            shown = ", ".join(f"{value:.3f}" for value in found["final"][level])
            print(
                f"async level {level}: {statistics.fmean(found['final'][level]):.3f} at the end ({shown})", flush=True
            )
    if arguments.plot is not None:
        plot(found, arguments.plot)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
