"""Tasks that others ship as Python packages: an entry point of the group ``farflung.tasks``.

1. The entry point's name is the task's, its object a function that takes the parameters (a map out of JSON) and gives
   an object with ``question(seed) -> str`` and ``score(seed, response) -> float``. A seed is an integer 0…2³¹−1; a
   reward is from 0 to 1. Both must follow from their arguments alone: rewards are consensus. An attribute ``count``
   says how many different questions there are; it is asked for seeds below it only.
2. The pin is ``package==version``. The same name in two packages is no conflict: the pin tells which is meant.
3. The package's code runs only in the sandboxed tasks child. ``locate`` reads what the installation says about it, and
   looks for its files; it imports nothing of it.
4. The global random generator is seeded before each call. What the code raises scores 0, but for what says that the
   machine is too small or too slow, which is undecidable; so are a NaN and what is no number at all.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.errors import UserError
from node.tasks import answer_bounds, task_versions
from node.tasks.reasoning_tasks import close_match
from protocol.constants import MILLION
from protocol.taskset import MAX_ITEM

GROUP: Final = "farflung.tasks"


@dataclass(frozen=True, slots=True)
class TaskOffer:
    """A task that an installed package ships: its name, the package, its version, and the object "module:name"."""

    name: str
    package: str
    version: str
    target: str

    @property
    def pin(self) -> str:
        """What a genesis pins."""
        return f"{self.package}=={self.version}"


def offers() -> list[TaskOffer]:
    """The tasks of all installed packages, by name and package. Imports nothing of them."""
    found = {
        TaskOffer(entry.name, entry.dist.name, entry.dist.version, entry.value)
        for entry in importlib.metadata.entry_points(group=GROUP)
        if entry.dist is not None
    }
    return sorted(found, key=lambda offer: (offer.name, offer.package))


def choose(name: str, package: str | None) -> TaskOffer:
    """The installed offer of the task ``name``, of ``package`` where that is given. Raises ``UserError``."""
    known = offers()
    fitting = [offer for offer in known if offer.name == name and package in (None, offer.package)]
    if not fitting:
        of = "" if package is None else f" of {package}"
        hint = close_match(name, {offer.name for offer in known})
        raise UserError(f"no installed package has a task {name!r}{of}{hint}", "farflung tasks ls lists them")
    if len(fitting) > 1:
        packages = " and ".join(offer.package for offer in fitting)
        raise UserError(f"{packages} both have a task {name!r}", f'write package = "{fitting[0].package}"')
    return fitting[0]


def pinned(name: str, pin: str) -> TaskOffer:
    """The installed offer that a genesis pins. Raises ``UserError`` that says what to install."""
    pairs = task_versions.requirements(pin)
    if len(pairs) != 1:
        raise UserError(f"the task {name} pins {pin!r} instead of one package", "ask the domain's creator")
    if (problem := task_versions.problem(pairs)) is not None:
        raise UserError(f"the task {name} comes in a package: {problem[0]}", problem[1])
    return choose(name, pairs[0][0])


def locate(offer: TaskOffer) -> tuple[list[Path], list[Path]]:
    """The files and folders that hold an offer's code and what its installation says, and the folders to import from.

    Also those of an editable installation, which lie elsewhere. Raises ``UserError`` where there is no such code.
    """
    module = offer.target.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise UserError(f"the task {offer.name} of {offer.package} names {offer.target}, which is not there")
    if spec.submodule_search_locations is not None:
        code = [Path(place) for place in spec.submodule_search_locations]
    else:
        code = [Path(spec.origin)] if spec.origin else []
    says = _metadata(offer.package)
    found = code if says is None else [*code, says]
    return found, [path.parent for path in found]


def _metadata(package: str) -> Path | None:
    """The folder with what the installation says about a package."""
    root = Path(str(importlib.metadata.distribution(package).locate_file("")))
    plain = re.sub(r"[-_.]+", "_", package).lower()
    folders = (folder for folder in root.glob("*.dist-info") if folder.name.lower().startswith(f"{plain}-"))
    return next(folders, None)


class PackageTask:
    """A task out of a package. Raises ``UserError`` where the package is not installed as pinned, or fails.

    Imports the package's code: only in a sandbox.
    """

    def __init__(self, name: str, parameters: str, version: str, *, paths: Sequence[str], sandboxed: bool) -> None:
        if not sandboxed:
            raise UserError(f"the task {name} of a package runs its code, and so needs a sandbox")
        values = task_versions.parameters(name, parameters)
        sys.path += [path for path in paths if path not in sys.path]
        offer = pinned(name, version)
        self.name = name
        try:
            make = importlib.metadata.EntryPoint(offer.name, offer.target, GROUP).load()
            self._task: Any = make(values)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise UserError(f"the task {name} of {offer.pin} does not start with its parameters: {why}") from None

    @property
    def count(self) -> int:
        """How many items there are: as many as seeds, unless the task has a number ``count`` of its own."""
        own = getattr(self._task, "count", None)
        return own if type(own) is int and 1 <= own <= MAX_ITEM else MAX_ITEM + 1

    def question(self, item: int) -> str:
        """The question of item 0…2³¹−1."""
        random.seed(item)
        return str(self._task.question(item % self.count))

    def score(self, item: int, response: str) -> int | None:
        """The reward of ``response`` in millionths; None is undecidable (rule 4)."""
        if len(response) > answer_bounds.MAX_RESPONSE:
            return 0
        random.seed(item)
        try:
            found = self._task.score(item % self.count, response)
        except (MemoryError, RecursionError):
            raise
        except Exception:
            return 0
        try:
            reward = float(found)
        except (TypeError, ValueError, OverflowError):
            return None
        return None if math.isnan(reward) else round(max(0.0, min(1.0, reward)) * MILLION)
