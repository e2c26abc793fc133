"""Founding a devnet's domain: the signed genesis in node 1's data directory, and version 0 beside it.

``--tasks`` is either names of reasoning-gym data sets with commas (``chain_sum,gcd``) or a TOML file::

    [[task]]
    name = "chain_sum"
    weight = 2                                  # its share of the mix; 1 where left out
    parameters = { min_terms = 2, max_terms = 2 }

    [[task]]
    kind = "jsonl"                              # "reasoning-gym" where left out
    name = "homework"
    file = "homework.jsonl"                     # lines of {"question": …, "answer": …}, beside the TOML file

Versions of the packages that questions and scores come from are pinned as they are here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import trio

from node import starter
from node.errors import UserError
from node.starter import defaults
from node.store.blobs import BlobStore
from node.store.directory import DataDirectory
from node.store.versions import VersionStore
from node.tasks import catalogue, service
from node.workers.client import WorkerError, open_worker
from proofs.checks import FLOAT32_THRESHOLDS
from protocol.constants import MAX_BLOB_BYTES
from protocol.domain import Model, Policy, Task, default_timings, make_genesis
from protocol.errors import LocalError
from protocol.manifest import Manifest
from protocol.records import Blob

MODEL: Final = Path(starter.__file__).parent
"""The folder of the starter model's files."""
AUDIT_SHARE: Final = 500_000
"""Half of a submission's groups: whoever forges all is caught for certain, at half the price of replaying all."""
CONVERT_TIMEOUT: Final = 120.0
ROOM: Final = 64 << 20
"""Bytes that a founder needs free besides what every node needs: the model in two forms."""

_KEYS: Final = {"kind", "name", "weight", "parameters", "file"}


def task_rows(text: str | None) -> list[dict[str, Any]]:
    """The task table (see ``node.tasks.catalogue``) that ``--tasks`` stands for; None is the starter model's own mix.

    Raises ``UserError``.
    """
    if text is None:
        return [{**asdict(task), "data": None} for task in defaults.TASKS]
    path = Path(text)
    if path.suffix == ".toml" or "/" in text:
        return _file_rows(path)
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [_row({"name": name}, Path(), f"--tasks {text}") for name in names]


def _file_rows(path: Path) -> list[dict[str, Any]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})", "name a TOML file of tasks") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}", "correct that line") from None
    tasks = table.get("task")
    if set(table) != {"task"} or not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise UserError(f"{path}: expected [[task]] sections and nothing else", "see docs/OPERATING.md")
    return [_row(task, path.parent, f"{path}: task {number}") for number, task in enumerate(tasks, 1)]


def _row(task: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    if unknown := set(task) - _KEYS:
        raise UserError(f"{where}: unknown key {min(unknown)!r}", f"known keys are {', '.join(sorted(_KEYS))}")
    kind, name, weight = task.get("kind", "reasoning-gym"), task.get("name"), task.get("weight", 1)
    if not isinstance(name, str) or not 1 <= len(name) <= 64 or not name.isascii() or not name.isprintable():
        raise UserError(f"{where}: the name is missing or not 1 to 64 printable ASCII characters")
    if type(weight) is not int or not 1 <= weight <= 1_000_000:
        raise UserError(f"{where}: the weight of {name} is not an integer from 1 to 1000000")
    if kind not in catalogue.KINDS:
        raise UserError(f"{where}: unknown kind {kind!r}", f"use {' or '.join(catalogue.KINDS)}")
    parameters = json.dumps(task.get("parameters", {}), sort_keys=True)
    if not isinstance(task.get("parameters", {}), dict) or len(parameters) > 2000:
        raise UserError(f"{where}: the parameters of {name} are not a table of at most 2000 characters")
    file = task.get("file")
    if (kind == "jsonl") != isinstance(file, str):
        raise UserError(f"{where}: {name}: a jsonl task, and no other, names its file", 'write file = "….jsonl"')
    return {
        "kind": kind,
        "name": name,
        "weight": weight,
        "parameters": parameters,
        "version": catalogue.package_version(kind),
        "data": None if file is None else str((folder / file).absolute()),
    }


def policy(nodes: int) -> Policy:
    """The policy of a devnet that waits for ``nodes`` nodes before its first term. A newcomer may validate."""
    return Policy(
        min_nodes=nodes,
        relays_min=1,
        relays_per_million=100_000,
        validators_min=1,
        validators_per_million=100_000,
        validator_reputation=0,
        audit_share=AUDIT_SHARE,
    )


async def found(directory: DataDirectory, *, name: str, nodes: int, tasks: str | None) -> None:
    """Make the domain with the key of ``directory`` as creator and only elector; everything lies there afterwards.

    Raises ``UserError`` for tasks that cannot be used and for a disk without room.
    """
    rows = task_rows(tasks)
    directory.require_room(ROOM)
    try:
        await service.check(rows)
        async with open_worker("node.workers.engine", name="engine") as worker:
            scratch = directory.work / "version-0.bin"
            model_files = await worker.call(
                "convert", timeout=CONVERT_TIMEOUT, model_dir=str(MODEL), output=str(scratch)
            )
        genesis = await trio.to_thread.run_sync(_store, directory, name, nodes, rows, model_files, scratch)
    except WorkerError as error:
        raise UserError(f"the domain cannot be made: {error}") from None
    except OSError as error:
        raise UserError(f"{directory.path}: the model cannot be stored ({error.strerror})", "free some room") from None
    directory.save_genesis(genesis)


def _store(
    directory: DataDirectory,
    name: str,
    nodes: int,
    rows: Sequence[Mapping[str, Any]],
    model_files: Mapping[str, Any],
    scratch: Path,
) -> bytes:
    blobs = BlobStore(directory.blobs)
    manifest = Manifest.of_file(model_files["tensors"], scratch.read_bytes(), model_files["checksum"])
    encoded = manifest.encode()
    VersionStore(directory.versions).adopt(encoded, scratch)
    model = Model(
        architecture=model_files["architecture"],
        config=_blob(blobs, Path(model_files["config"])),
        tokenizer=_blob(blobs, Path(model_files["tokenizer"])),
        manifest=Blob(blobs.put(encoded), len(encoded)),
        whole=manifest.whole,
        compute_dtype="float32",
    )
    creator = directory.read_identity()
    try:
        return make_genesis(
            creator,
            name=name,
            devnet=True,
            electors=(creator.node,),
            validators=(),
            model=model,
            tasks=tuple(_task(blobs, row) for row in rows),
            recipe=defaults.RECIPE,
            timings=default_timings(devnet=True),
            policy=policy(nodes),
            thresholds=FLOAT32_THRESHOLDS,
        )
    except LocalError as error:
        raise UserError(f"such a domain is not possible: {error}") from None


def _blob(blobs: BlobStore, path: Path) -> Blob:
    data = path.read_bytes()
    if len(data) > MAX_BLOB_BYTES:
        raise UserError(f"{path}: {len(data)} bytes, at most {MAX_BLOB_BYTES} can travel", "split the file")
    return Blob(blobs.put(data), len(data))


def _task(blobs: BlobStore, row: Mapping[str, Any]) -> Task:
    data = None if row["data"] is None else _blob(blobs, Path(row["data"]))
    return Task(row["kind"], row["name"], row["weight"], row["parameters"], row["version"], data)
