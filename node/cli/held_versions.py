"""Versions of the weights on a node's disk: listed, chosen, fetched where they lack, and put into an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.api.control_client import Declined
from node.cli import options, tables
from node.cli.node_reading import ask, ask_or_none, ask_running, lock_holder, offline
from node.cli.options import Values
from node.domain import joining, pinned_files
from node.errors import UserError
from node.store.data_directory import DataDirectory
from node.store.version_store import VersionStore
from node.weights.retention import RetentionBasis, lineage_of, room
from node.workers.child_messages import ConfigureEngine
from protocol.domain import Domain
from protocol.log.entry import Entry

if TYPE_CHECKING:
    from node.roles.engine_client import Setup

NEWEST: Final = -1
"""Stands for the number of the newest version."""
POLL: Final = 0.25
"""Seconds between two questions after a version that is on its way."""


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version that is on the disk whole; ``id`` is empty before version 0 is announced."""

    number: int
    id: str
    folder: Path

    @property
    def manifest(self) -> Path:
        """The file with its manifest."""
        return self.folder / "manifest"

    @property
    def whole(self) -> Path:
        """The file with its bytes."""
        return self.folder / "whole.bin"


def read_offline(directory: DataDirectory) -> tuple[Sequence[Entry], VersionStore, RetentionBasis]:
    """What commands need of a node that does not run: its lineage's entries, none where it never ran."""
    domain = joining.required(directory)
    entries = offline(directory)[0].lineage() if directory.log_database.exists() else ()
    config = directory.config().weights
    directory.versions.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = VersionStore(directory.versions, quota=config.quota << 20, reserve=config.reserve << 20, owner=False)
    return entries, store, lineage_of(entries, domain)


def on_disk(directory: DataDirectory) -> Values:
    """What is on the disk: from the daemon, else from the folder's own log."""
    # Imported here: an answer of the daemon comes without what a running node is made of.
    from node.api.weight_requests import objects

    found = ask_or_none(directory, "weights")
    if found is not None:
        return found
    entries, store, lineage = read_offline(directory)
    return {**room(store), "domain": joining.required(directory).id.hex(), "objects": objects(entries, store, lineage)}


def whole_versions(directory: DataDirectory) -> list[HeldVersion]:
    """The versions of the lineage that are here whole."""
    return [
        HeldVersion(number, identity, directory.versions / row["digest"])
        for row in on_disk(directory)["objects"]
        if row["kind"] == "version" and row["numbers"] and row["here"] == row["size"]
        for number, identity in zip(row["numbers"], row["ids"] or [""], strict=True)
    ]


def among(versions: Sequence[HeldVersion], wanted: int | str) -> HeldVersion | None:
    """The version of this number, or whose id begins so. Raises ``UserError`` where several ids do."""
    if wanted == NEWEST:
        return max(versions, key=lambda each: each.number, default=None)
    if isinstance(wanted, int):
        return next((each for each in versions if each.number == wanted), None)
    alike = [each for each in versions if each.id.startswith(wanted)]
    if len(alike) > 1:
        raise UserError(f"--version {wanted}: the ids of {len(alike)} versions begin so", "give more of its digits")
    return alike[0] if alike else None


def choose(directory: DataDirectory, wanted: int, remedy: str) -> HeldVersion:
    """The version of this number. Raises ``UserError`` with ``remedy`` where it is not here whole."""
    versions = whole_versions(directory)
    found = among(versions, wanted)
    if found is None:
        raise _lacking(directory, versions, wanted, "", remedy)
    return found


def choose_or_fetch(directory: DataDirectory, wanted: Sequence[int | str]) -> list[HeldVersion]:
    """The versions, fetched by the running daemon where they are not here. Raises ``UserError``."""
    versions = whole_versions(directory)
    found: list[HeldVersion] = []
    for each in wanted:
        version = among(versions, each)
        if version is None:
            if lock_holder(directory) is None:
                remedy = f"farflung run --data-dir {directory.path}"
                raise _lacking(directory, versions, each, ", and no daemon runs to fetch one", remedy)
            version = _fetched(directory, each)
        found.append(version)
    return found


def _lacking(
    directory: DataDirectory, versions: Sequence[HeldVersion], wanted: int | str, more: str, remedy: str
) -> UserError:
    numbers = ", ".join(str(each.number) for each in versions) or "none"
    what = "no version is" if wanted == NEWEST else f"version {wanted} is not"
    return UserError(f"{directory.path}: {what} here whole (whole are: {numbers}){more}", remedy)


def _fetched(directory: DataDirectory, wanted: int | str) -> HeldVersion:
    what = "the newest version" if wanted == NEWEST else f"version {wanted}"
    options.note(f"{what} is not here: the node fetches it")
    try:
        number = pull(directory, wanted)["version"]
    except Declined as error:
        raise UserError(str(error), "farflung weights ls shows what is here") from None
    version = among(whole_versions(directory), number)
    if version is None:
        raise UserError(f"{directory.path}: version {number} was removed again", "try again, or name a newer one")
    return version


def pull(
    directory: DataDirectory, version: int | str, poll: float = POLL, clock: Callable[[], float] | None = None
) -> Values:
    """Return once the directory's daemon holds a version: its number, -1 for the newest, or its id's first digits.

    The answer has its number (``version``) and ``size``. Raises ``Declined`` where it does not arrive, and
    ``UserError`` where no daemon answers.
    """
    ask_running(directory, "can fetch", f"farflung run --data-dir {directory.path}")
    parts = ("version {task.fields[version]}", "{task.fields[part]}", "bar", "bytes")
    speed = ("{task.fields[rate]}", "{task.fields[peers]}", "left")
    with tables.progress(*parts, *speed, clock=clock) as bar:
        task = bar.add_task("", total=None, version="?", part="", rate="", peers="")
        part = None
        while True:
            found = ask(directory, "weights-pull", version=version)
            if found["done"]:
                return found
            if found["part"] != part:
                part = found["part"]
                bar.reset(task, total=found["total"])
            bar.update(
                task,
                total=found["total"],
                completed=found["have"],
                version=found["version"],
                part=part,
                rate=f"{tables.size(found['rate'])}/s",
                peers=f"from {options.counted(found['peers'], 'peer')}",
            )
            time.sleep(poll)


def engine_setup(directory: DataDirectory, domain: Domain, engine: str | None, threads: int | None) -> Setup:
    """How to start an engine for the domain's weights, by the node's configuration where nothing else is said.

    Raises ``UserError`` where a file of the model is not here.
    """
    from node.roles.engine_client import Setup

    config = directory.config()
    return Setup(
        configured=ConfigureEngine(
            config=str(pinned_files.path(directory, domain.model.config)),
            tokenizer=str(pinned_files.path(directory, domain.model.tokenizer)),
            recipe=domain.recipe,
            threads=threads or config.threads,
            dtype=domain.model.compute_dtype,
            tensor_parallel=config.tensor_parallel,
        ),
        engine=engine or config.engine,
        cache=directory.path / "vllm",
    )
