"""A model of 16 numbers, and children that compute with it: what they answer follows from a hash, in this process."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from node.daemon import Machinery
from node.store.hashing import hash_bytes
from node.workers import child_loop, frames
from node.workers import delta_child as delta_worker
from node.workers.child_messages import (
    AppliedDelta,
    ApplyDelta,
    ConfigureEngine,
    ConfigureTrainer,
    DescribedVersion,
    DescribeVersion,
    EncodePrompts,
    EngineReady,
    GenerateGroups,
    LoadTraining,
    LoadVersion,
    ReplayedGroup,
    ReplayGroups,
    TensorRow,
    Trained,
    TrainerReady,
    TrainingStopped,
    TrainStep,
    WrittenGroup,
    WrittenGroups,
    WrittenResponse,
)
from node.workers.child_process import WorkerError
from node.workers.frames import Answer, ChildRequest
from proofs.checks import GroupReplay
from protocol.constants import MILLION
from protocol.domain import Admission, Model, Policy, Recipe, Task, default_timings, make_genesis
from protocol.records import Blob
from protocol.taskset import TaskSet
from protocol.weights.manifest import Manifest
from protocol.work.rollout import Submission, pack
from tests.node.fake_bulk import FakeBulkChild
from tests.protocol.builders import GENEROUS, MEMBERS, POLICY, RECIPE, THRESHOLDS, key

TENSORS: list[TensorRow] = [("weights", "F32", (4, 4))]
CONFIG, TOKENIZER = b'{"model_type": "llama"}', b'{"model": "words"}'
VOCABULARY, END = 256, 1
TASK_SET = TaskSet.of(range(0, 2000, 7)).encode()
TASKS_FILE = b'{"question": "1 + 1", "answer": "2"}\n'


def checksum(raw: bytes) -> int:
    """What the engine measures of its tensors."""
    return int.from_bytes(hashlib.sha256(raw).digest()[:7], "big") + 1


def manifest_of(raw: bytes) -> Manifest:
    """The manifest of the 64 bytes of a version."""
    return Manifest.of_file(TENSORS, raw, checksum(raw))


WHOLE_0 = np.linspace(-1, 1, 16, dtype="<f4").tobytes()
"""Version 0."""


def genesis(
    recipe: Recipe = RECIPE,
    policy: Policy = POLICY,
    *,
    devnet: bool = True,
    electors: tuple[str, ...] = ("elector",),
    admission: Admission = GENEROUS,
) -> bytes:
    """A signed genesis by "elector" whose model is version 0 above."""
    manifest = manifest_of(WHOLE_0)
    encoded = manifest.encode()
    return make_genesis(
        key("elector"),
        name="fakes",
        devnet=devnet,
        electors=tuple(key(elector).node for elector in electors),
        validators=(),
        trainers=tuple(key(member).node for member in MEMBERS),
        admission=admission,
        model=Model(
            architecture="llama",
            config=Blob(hash_bytes(CONFIG), len(CONFIG)),
            tokenizer=Blob(hash_bytes(TOKENIZER), len(TOKENIZER)),
            manifest=Blob(manifest.digest, len(encoded)),
            whole=manifest.whole,
            compute_dtype="float32",
        ),
        tasks=(
            Task(
                "reasoning-gym",
                "basic_arithmetic",
                3,
                "{}",
                "0.1.25",
                None,
                Blob(hash_bytes(TASK_SET), len(TASK_SET)),
            ),
            Task("jsonl", "homework", 1, "{}", "0.9.0", Blob(hash_bytes(TASKS_FILE), len(TASKS_FILE))),
        ),
        recipe=recipe,
        timings=default_timings(devnet=True),
        policy=policy,
        thresholds=THRESHOLDS,
    )


@dataclass
class Faults:
    """What children do wrong: ``fail[op]`` is raised by the operation of that name, the given number of times."""

    fail: dict[str, tuple[Exception, int]] = field(default_factory=dict)
    diverge: int = 0
    """Steps of the trainer still to be stopped."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(child, operation) of every call."""
    arguments: list[dict[str, Any]] = field(default_factory=list)
    running: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    """Time that an operation takes; 0.05 where nothing else is said."""
    before: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Called while the operation runs."""
    score: Callable[[int, str], int] = lambda item, text: MILLION if (item + int(text)) % 2 == 0 else 0
    """What an answer to an item is worth."""
    machinery: Machinery = field(default_factory=Machinery)
    """What starts such children."""

    async def note(self, child: str, op: str, arguments: dict[str, Any]) -> None:
        self.calls.append((child, op))
        self.arguments.append(arguments)
        await trio.sleep(self.seconds.get(op, 0.05))
        if op in self.before:
            self.before[op]()
        error, times = self.fail.get(op, (None, 0))
        if error is not None and times:
            self.fail[op] = (error, times - 1)
            raise error

    def count(self, child: str, op: str) -> int:
        return self.calls.count((child, op))


class Child:
    """What ``node.workers.child_process.Worker`` is for a role."""

    def __init__(self, name: str, pid: int, faults: Faults) -> None:
        self.name = name
        self.pid = pid
        self.faults = faults
        self.alive = True

    async def call(self, request: ChildRequest[Answer], *, timeout: float) -> Answer:
        op = frames.operation_of(type(request))
        if not self.alive:
            raise WorkerError(f"{self.name}: {op}: the child ended with exit code 1", "died")
        try:
            await self.faults.note(self.name, op, msgspec.structs.asdict(request))
        except WorkerError as error:
            self.alive = not error.gone
            raise
        # What goes over the pipe is what counts: a message that its type does not allow fails here as it would there.
        received = frames.decode(frames.encode(request)[frames.HEADER_BYTES :], type(request))
        answer: Answer = self.operations()[type(request)](received)  # type: ignore[assignment]
        return answer

    def operations(self) -> child_loop.Table:
        """What it answers."""
        raise NotImplementedError


class EngineChild(Child):
    """Its "model" answers with the low bits of a hash over weights, seed and place."""

    raw = b""

    def operations(self) -> child_loop.Table:
        return child_loop.table([self.configure, self.load, self.encode, self.generate, self.replay])

    def configure(self, request: ConfigureEngine) -> EngineReady:
        assert request.dtype == "float32"
        assert Path(request.config).read_bytes() == CONFIG
        assert Path(request.tokenizer).read_bytes() == TOKENIZER
        self.recipe = request.recipe
        return EngineReady(END, VOCABULARY)

    def load(self, request: LoadVersion) -> int:
        Manifest.parse(Path(request.manifest).read_bytes())
        self.raw = Path(request.weights).read_bytes()
        return checksum(self.raw)

    def encode(self, request: EncodePrompts) -> list[bytes]:
        return [pack(self._prompt(prompt)) for prompt in request.prompts]

    def _prompt(self, prompt: str) -> list[int]:
        return list(prompt.encode())[: self.recipe.max_prompt_tokens]

    def _answers(self, seed: bytes) -> list[int]:
        return [
            2 + hashlib.sha256(self.raw + seed + bytes([place])).digest()[0] % 8
            for place in range(self.recipe.group_size)
        ]

    def generate(self, request: GenerateGroups) -> WrittenGroups:
        groups = []
        for prompt, seed in zip(request.prompts, request.seeds, strict=True):
            responses = [WrittenResponse(pack([a, END]), pack([700, 0]), 1, str(a)) for a in self._answers(seed)]
            groups.append(WrittenGroup(pack(self._prompt(prompt)), responses, b"proof"))
        return WrittenGroups(groups, 2 * len(groups) * self.recipe.group_size, 0.5)

    def replay(self, request: ReplayGroups) -> list[ReplayedGroup]:
        found = []
        for group in request.groups:
            claimed = [int.from_bytes(tokens[:4], "little") for tokens, _ in group.responses]
            wrong = sum(a != b for a, b in zip(claimed, self._answers(group.seed), strict=True))
            tokens = sum(len(tokens) // 4 for tokens, _ in group.responses)
            measured = GroupReplay(tokens, wrong, wrong * MILLION, wrong * MILLION, 0, 8, 0, 0, 0)
            found.append(ReplayedGroup(measured, [str(answer) for answer in claimed]))
        return found


class TrainerChild(Child):
    """A step adds one to the last byte of every number; the checkpoint holds the number of steps made."""

    raw = b""
    steps = 0

    def operations(self) -> child_loop.Table:
        return child_loop.table([self.configure, self.load, self.train])

    def configure(self, request: ConfigureTrainer) -> TrainerReady:
        self.recipe = request.recipe
        return TrainerReady(16, 1, False)

    def load(self, request: LoadTraining) -> int:
        assert (request.reference is None) == (self.recipe.kl == 0)
        if request.reference is not None:
            assert Path(request.reference[1]).read_bytes() == WHOLE_0
        self.raw = Path(request.weights).read_bytes()
        self.steps = 0 if request.checkpoint is None else int(Path(request.checkpoint).read_text())
        return checksum(self.raw)

    def train(self, request: TrainStep) -> Trained | TrainingStopped:
        if self.faults.diverge:
            self.faults.diverge -= 1
            return TrainingStopped("the loss (nan) or the gradient norm (nan) is not finite")
        parsed = [Submission.parse(Path(path).read_bytes(), self.recipe) for path in request.submissions]
        self.raw = b"".join(
            (int.from_bytes(self.raw[i : i + 4], "little") + 1).to_bytes(4, "little") for i in range(0, 64, 4)
        )
        self.steps += 1
        Path(request.output).write_bytes(self.raw)
        Path(request.checkpoint).write_text(str(self.steps))
        used = [group for one in parsed for group in one.groups if group.signal]
        trained = sum(len(group.responses) for group in used)
        tokens = sum(len(response.tokens) for group in used for response in group.responses)
        return Trained({}, trained, tokens, TENSORS, checksum(self.raw))


class Tasks:
    """What ``node.tasks.task_service.TaskService`` is for a role: an even answer to an even item is right."""

    def __init__(self, table: Sequence[dict[str, Any]], faults: Faults) -> None:
        self.table = table
        self.faults = faults
        self.undecidable = False
        self.counts = (1 << 31,) * len(table)

    async def __aenter__(self) -> Tasks:
        self.faults.running["tasks"] += 1
        return self

    async def __aexit__(self, *error: object) -> None:
        self.faults.running["tasks"] -= 1

    async def questions(self, items: Sequence[tuple[int, int]]) -> list[str]:
        await self.faults.note("tasks", "questions", {"items": items})
        return [f"{self.table[index]['name'][:8]} {item}" for index, item in items]

    async def score(self, items: Sequence[tuple[int, int, str]]) -> list[int | None]:
        await self.faults.note("tasks", "score", {"items": items})
        if "undecidable" in self.faults.before:
            return [None for _ in items]
        return [self.faults.score(item, text) for _, item, text in items]

    async def confirm(self, items: Sequence[tuple[int, int, str]], claimed: Sequence[int]) -> list[int | None]:
        await self.faults.note("tasks", "confirm", {"items": items})
        return await self.score(items)


class DeltaChild(Child):
    """The real work, in this process."""

    def operations(self) -> child_loop.Table:
        return child_loop.table([self.describe, self.apply])

    def describe(self, request: DescribeVersion) -> DescribedVersion:
        return delta_worker.describe(msgspec.structs.replace(request, threads=1))

    def apply(self, request: ApplyDelta) -> AppliedDelta:
        return delta_worker.apply(msgspec.structs.replace(request, threads=1))


CHILDREN = {
    "node.workers.engine_child": EngineChild,
    "node.workers.trainer_child": TrainerChild,
    "node.workers.delta_child": DeltaChild,
}


def install(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Every child is one of the above, and work for threads is done at once: no thread moves the mock clock."""
    shared = Faults()
    pids = iter(range(1000, 2000))

    @asynccontextmanager
    async def open_worker(module: str, *, name: str, **other: Any) -> AsyncIterator[Child]:
        kind = CHILDREN[module]
        shared.running[name] += 1
        shared.most[name] = max(shared.most[name], shared.running[name])
        child = kind(name, next(pids), shared)
        try:
            await shared.note(name, "start", {})
            yield child
        finally:
            # A child takes a moment to die, and its owner waits for that.
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)
            shared.running[name] -= 1

    async def at_once(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    # Neither is the real thing by its type, only by what it does.
    opener: Any = open_worker
    tasks: Any = partial(Tasks, faults=shared)
    shared.machinery = Machinery(opener, tasks, FakeBulkChild)
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    monkeypatch.setattr(trio.from_thread, "run_sync", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return shared
