"""Trainer tokens a second against TRL's GRPOTrainer: ``python -m tests.bench.learning_trainer --trl PYTHON [--json]``.

``tokens_per_second``  response tokens (not padding) of one optimizer step by its seconds, the median of the steps
``ratio``              ours by TRL's, the median over alternating pairs of steps
``cpu_ratio``          the same by processor time, which other processes of the machine disturb less
``padding``            the share of slots that hold no token

Both get the same completions, advantages, dtype (float32), threads, slots a pass and clip limits; no KL term, one
optimizer step a batch, no activation checkpointing, AdamW fused. A step is everything from completions in memory to
updated weights. TRL runs in the virtual environment of PYTHON (``pip install trl``). ``--model DIR`` adds a model to
the starter's; the lengths are then those of reasoning, else those of the starter's answers.

The figures of one run count only against each other.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from node.domain import founding
from node.starter.defaults import RECIPE

SLOTS: Final = 2048
LEARNING_RATE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """What one optimizer step is fed: groups, their size, and the bounds of prompt and response lengths."""

    groups: int
    size: int
    prompt: tuple[int, int]
    response: tuple[int, int]


SHAPES: Final = {
    "starter": {"mixed": Shape(64, 16, (14, 18), (1, 5)), "equal": Shape(64, 16, (16, 16), (4, 4))},
    "model": {"mixed": Shape(2, 8, (24, 40), (16, 112)), "equal": Shape(2, 8, (32, 32), (96, 96))},
}


def make_data(shape: Shape, vocabulary: int) -> dict[str, Any]:
    """Random prompts and completions of a shape; every group has signal."""
    draw = random.Random(0)

    def line(bounds: tuple[int, int]) -> list[int]:
        return [draw.randrange(2, vocabulary) for _ in range(draw.randint(*bounds))]

    prompts = [line(shape.prompt) for _ in range(shape.groups)]
    groups = [[line(shape.response) for _ in range(shape.size)] for _ in range(shape.groups)]
    rewards = [[number % 2 * 1_000_000 for number in range(shape.size)] for _ in range(shape.groups)]
    # As in grpo.advantages: half of a group right.
    deviation = statistics.stdev([0, 1] * (shape.size // 2))
    advantages = [[(reward / 1e6 - 0.5) / (deviation + 1e-6) for reward in group] for group in rewards]
    widest = max(map(len, prompts)) + max(len(line) for group in groups for line in group)
    rows = max(1, SLOTS // widest)
    while shape.groups * shape.size % rows:
        rows -= 1
    return {
        "prompts": prompts,
        "groups": groups,
        "rewards": rewards,
        "advantages": advantages,
        "micro_batch": rows,
        "learning_rate": LEARNING_RATE,
    }


def padding(data: dict[str, Any]) -> float:
    """The share of TRL's slots that hold no token."""
    longest = max(map(len, data["prompts"])) + max(len(line) for group in data["groups"] for line in group)
    pairs = zip(data["prompts"], data["groups"], strict=True)
    tokens = sum(len(prompt) + len(line) for prompt, group in pairs for line in group)
    return 1 - tokens / (longest * sum(map(len, data["groups"])))


def serve_ours(model: str, data: str, threads: int) -> None:
    """Our side, as ``tests.bench.trl_side`` is TRL's."""
    import torch

    from node.workers import row_layout, sharding, weight_files
    from node.workers.learner import ROW_SLOTS, Learner, TrainingSample, make_policy
    from node.workers.model_config import read_config
    from node.workers.trainer_child import _fill

    torch.set_num_threads(threads)
    given = json.loads(Path(data).read_text())
    recipe = replace(RECIPE, inner_steps=1, learning_rate=int(LEARNING_RATE * 10**12), warmup_steps=0)
    config = read_config(Path(model) / "config.json")
    group = sharding.alone("cpu", sharded=False)
    policy = make_policy(config, recipe, group, torch.float32)
    tensors = weight_files.read_safetensors(Path(model))
    if config.tied:
        tensors.pop("lm_head.weight", None)
    _fill(group, policy, tensors)
    learner = Learner(policy, recipe, group)
    samples = [
        TrainingSample(prompt, lines, [[5_000_000] * len(line) for line in lines], rewards)
        for prompt, lines, rewards in zip(given["prompts"], given["groups"], given["rewards"], strict=True)
    ]
    packed = row_layout.pack(
        [row_layout.RowGroup(s.prompt, s.responses) for s in samples],
        row_slots=ROW_SLOTS["cpu"],
        batch_slots=SLOTS,
        sort=True,
    )
    held = sum(int((batch.segments != row_layout.PADDING).sum()) for batch in packed)
    share = 1 - held / sum(batch.slots for batch in packed)
    while sys.stdin.readline():
        begun, cpu = time.perf_counter(), time.process_time()
        learner.train(samples)
        found = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu, "padding": share}
        print(json.dumps(found), flush=True)


@contextmanager
def side(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """One of the two processes."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    """One step of a side."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def compare(model: Path, shape: Shape, trl: str, threads: int, pairs: int) -> dict[str, float]:
    """The figures of one model and shape."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    data = make_data(shape, vocabulary)
    tokens = sum(len(line) for group in data["groups"] for line in group)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.json"
        path.write_text(json.dumps(data))
        common = [str(model), str(path), str(threads)]
        other = str(Path(__file__).with_name("trl_side.py"))
        with (
            side([sys.executable, "-m", "tests.bench.learning_trainer", "--serve", *common]) as ours,
            side([trl, other, *common]) as theirs,
        ):
            share = ask(ours)["padding"]  # the first step allocates the optimizer's state
            ask(theirs)
            steps = [(ask(ours), ask(theirs)) for _ in range(pairs)]
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / statistics.median(mine["seconds"] for mine, _ in steps),
        "trl_tokens_per_second": tokens / statistics.median(trls["seconds"] for _, trls in steps),
        "ratio": statistics.median(trls["seconds"] / mine["seconds"] for mine, trls in steps),
        "cpu_ratio": statistics.median(trls["cpu"] / mine["cpu"] for mine, trls in steps),
        "padding": share,
        "trl_padding": padding(data),
    }


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="the Python of a virtual environment with TRL")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, beside the starter model")
    parser.add_argument("--only", choices=("starter", "model"), help="one of the two")
    parser.add_argument("--lengths", choices=("mixed", "equal"), help="one of the two")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=3, help="steps of each side that count (default 3)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_ours(arguments.serve[0], arguments.serve[1], int(arguments.serve[2]))
        return
    if arguments.trl is None:
        parser.error("--trl names the Python of a virtual environment with TRL")
    models = {"starter": founding.MODEL}
    if arguments.model is not None:
        models["model"] = arguments.model
    found = {
        name: {
            lengths: compare(folder, shape, arguments.trl, arguments.threads, arguments.pairs)
            for lengths, shape in SHAPES[name].items()
            if arguments.lengths in (None, lengths)
        }
        for name, folder in models.items()
        if arguments.only in (None, name)
    }
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for name, both in found.items():
        for lengths, each in both.items():
            print(
                f"{name}, {lengths} lengths: {each['tokens_per_second']:.0f} response tokens/s, TRL"
                f" {each['trl_tokens_per_second']:.0f}: {each['ratio']:.2f} times, {each['cpu_ratio']:.2f} by processor"
                f" time; padding {each['padding']:.0%},"
                f" TRL {each['trl_padding']:.0%}"
            )


if __name__ == "__main__":
    main()
