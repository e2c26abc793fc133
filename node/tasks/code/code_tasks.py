"""A set of problems as a task: a question for an item's number, a reward for the program in a response.

1. Item n is problem n modulo their count. ``parameters`` is a JSON object with any of ``reward`` ("all", the default:
   one million where all tests pass, else 0; or "fraction": their share, rounded down), ``seconds`` of processor time
   a test (1…60, 4 where left out) and ``memory`` of it in MiB (64…4096, 512 where left out).
2. A test that takes too long or prints too much fails. All tests of one program together may use ``TOTAL_FACTOR``
   times the seconds of one; those beyond fail.
3. ``patient`` is for calling a claim false: three times the time and twice the memory, and where a test takes too long
   even then, the reward is undecidable (None). So a slow machine never convicts anybody.
4. Where the sandbox ends without an answer, the reward is undecidable as well.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.errors import UserError
from node.tasks import task_versions
from node.tasks.code import problems, program_runner
from node.tasks.code.inside_sandbox import WALL_FACTOR
from node.tasks.code.program_runner import Input, ProgramLimits, Python, Status
from node.tasks.question_files import line_of
from protocol.constants import MILLION

PATIENCE: Final = 3
MEMORY_PATIENCE: Final = 2
TOTAL_FACTOR: Final = 5
OUTPUT_BYTES: Final = 2 << 20
REWARDS: Final = ("all", "fraction")


Run = Callable[[Python, str, Sequence[Input], ProgramLimits], Generator[tuple[Status, bytes], None, None]]
"""Runs a program: ``node.tasks.code.program_runner.run``."""


@dataclass(frozen=True, slots=True)
class CodeSettings:
    """A task's parameters (rule 1)."""

    reward: str = "all"
    seconds: int = 4
    memory: int = 512

    @classmethod
    def parse(cls, name: str, text: str) -> CodeSettings:
        """Read JSON text. Raises ``UserError``."""
        values = task_versions.parameters(name, text)
        known = {"reward": REWARDS, "seconds": range(1, 61), "memory": range(64, 4097)}
        for key, value in values.items():
            if key not in known:
                raise UserError(f"{name} has no parameter {key!r}; it has {', '.join(known)}")
            if type(value) not in (str, int) or value not in known[key]:
                allowed = known[key]
                words = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else " or ".join(REWARDS)
                raise UserError(f"the parameter {key} of {name} must be {words}")
        return cls(**values)


class CodeTask:
    """A set of problems with tests. Blocking: scoring starts a sandbox.

    Raises ``UserError`` where the file or the parameters do not serve, and where programs cannot be run here.
    """

    def __init__(
        self,
        name: str,
        parameters: str,
        version: str,
        data: Path | None,
        *,
        patience: int = PATIENCE,
        run: Run = program_runner.run,
    ) -> None:
        if data is None:
            raise UserError(f"the code task {name} names no file", "give the path of a file of problems")
        self.name = name
        self.settings = CodeSettings.parse(name, parameters)
        pinned = task_versions.pinned_python(name, version)
        if (problem := program_runner.available(pinned)) is not None:
            raise UserError(f"the code task {name} cannot run programs here: {problem}")
        python = program_runner.find_python(pinned)
        assert python is not None
        self._python = python
        self._patience = patience
        self._run = run
        self._problems = problems.read(name, data)

    @property
    def longest(self) -> float:
        """Seconds of wall time that scoring one response takes at most, without patience."""
        return self.settings.seconds * (TOTAL_FACTOR + 1) * WALL_FACTOR + program_runner.START_SECONDS

    @property
    def count(self) -> int:
        """How many problems there are."""
        return len(self._problems)

    def question(self, item: int) -> str:
        """The question of item 0…2³¹−1."""
        return line_of(self._problems, item).question

    def score(self, item: int, response: str, *, patient: bool = False) -> int | None:
        """The reward of ``response`` in millionths; None is undecidable (rules 2 to 4)."""
        tests = line_of(self._problems, item).tests
        program = problems.program_of(response)
        if program is None:
            return 0
        settings = self.settings
        factor = self._patience if patient else 1
        limits = ProgramLimits(
            seconds=settings.seconds * factor,
            total=settings.seconds * factor * TOTAL_FACTOR,
            memory=(settings.memory << 20) * (MEMORY_PATIENCE if patient else 1),
            output=OUTPUT_BYTES,
        )
        passed = 0
        try:
            with closing(self._run(self._python, program, [test.given for test in tests], limits)) as results:
                for test, (status, output) in zip(tests, results, strict=True):
                    if status == "lost" or (status == "time" and patient):
                        return None
                    if status == "ok" and problems.right(test, output):
                        passed += 1
                    elif settings.reward == "all":
                        return 0
        except program_runner.Lost:
            return None
        return MILLION * passed // len(tests)
