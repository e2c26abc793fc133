"""Founding a domain: the signed genesis in the founder's data directory, and version 0 beside it.

A devnet and ``farflung domain create`` differ in the ``Founding`` that they ask for, and in nothing else. A devnet's
``--tasks`` is either names of reasoning-gym data sets with commas (``chain_sum,gcd``) or a TOML file::

    [[task]]
    name = "chain_sum"
    weight = 2                                  # its share of the mix; 1 where left out
    parameters = { min_terms = 2, max_terms = 2 }
    set = "chain_sum.txt"                       # the items to ask (node.tasks.task_sets); all where left out

    [[task]]
    kind = "jsonl"                              # questions with answers; "reasoning-gym" where left out
    name = "homework"
    file = "homework.parquet"                   # JSON lines or Parquet, beside the TOML file
    columns = { question = "problem" }          # as in node.tasks.question_conversion; the usual names where left out
    skip = true                                 # leave out rows that cannot be judged
    parameters = { check = "exact" }            # "math" where left out

    [[task]]
    kind = "code"                               # problems with tests, the same kinds of files
    name = "programs"
    file = "programs.jsonl"

    [[task]]
    kind = "package"                            # of an installed package (node.tasks.package_tasks)
    name = "riddles"
    package = "farflung-riddles"                # only where several packages have a task of that name

Files are converted to one form (``node.tasks.question_conversion``), which is what a genesis names. Versions of what
questions and scores come from are pinned as they are here.
"""

from __future__ import annotations

import json
import mmap
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import trio

from node import starter
from node.domain.domain_toml import AUDIT_SHARE, EARNED_REPUTATION, DomainFile
from node.errors import UserError
from node.starter import defaults
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from node.store.version_store import VersionStore
from node.tasks import catalogue, task_service, task_sets
from node.tasks import question_conversion as conversion
from node.workers.child_messages import ConvertedModel, ConvertModel
from node.workers.child_process import WorkerError, open_worker
from proofs.checks import FLOAT32_THRESHOLDS
from protocol.constants import MAX_BLOB_BYTES
from protocol.domain import (
    Domain,
    Model,
    Policy,
    Recipe,
    Task,
    Thresholds,
    Timings,
    default_timings,
    make_genesis,
    parse_genesis,
)
from protocol.errors import LocalError
from protocol.records import Blob
from protocol.weights.manifest import Manifest

MODEL: Final = Path(starter.__file__).parent
"""The folder of the starter model's files."""
CONVERT_TIMEOUT: Final = 120.0
CONVERT_SPEED: Final = 10e6
"""Bytes a second that converting a large model reaches at least."""
ROOM: Final = 64 << 20
"""Bytes that a founder needs free besides what every node needs: the model in two forms."""

_KEYS: Final = {"kind", "name", "weight", "parameters", "file", "set", "columns", "skip", "package"}


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
    if not names:
        raise UserError(f"--tasks {text!r}: no task is named", "name data sets with commas, or a TOML file of tasks")
    return [_row({"name": name}, Path(), f"--tasks {text}") for name in names]


def _file_rows(path: Path) -> list[dict[str, Any]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})", "name a TOML file of tasks") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}", "correct that line") from None
    tasks = table.get("task")
    if (
        set(table) != {"task"}
        or not isinstance(tasks, list)
        or not tasks
        or not all(isinstance(task, dict) for task in tasks)
    ):
        raise UserError(f"{path}: expected [[task]] sections and nothing else", "see docs/OPERATING.md")
    return [_row(task, path.parent, f"{path}: task {number}") for number, task in enumerate(tasks, 1)]


def _row(task: Mapping[str, Any], folder: Path, where: str, notes: list[str] | None = None) -> dict[str, Any]:
    """The row of one table; ``notes`` gets what was left out of its file."""
    if unknown := set(task) - _KEYS:
        raise UserError(f"{where}: unknown key {min(unknown)!r}", f"known keys are {', '.join(sorted(_KEYS))}")
    kind, name, weight = task.get("kind", "reasoning-gym"), task.get("name"), task.get("weight", 1)
    if not isinstance(name, str) or not 1 <= len(name) <= 64 or not name.isascii() or not name.isprintable():
        raise UserError(f"{where}: the name is missing or not 1 to 64 printable ASCII characters")
    if type(weight) is not int or not 1 <= weight <= 1_000_000:
        raise UserError(f"{where}: the weight of {name} is not an integer from 1 to 1000000")
    if kind not in catalogue.KINDS:
        raise UserError(f"{where}: unknown kind {kind!r}", f"use {' or '.join(catalogue.KINDS)}")
    try:
        parameters = json.dumps(task.get("parameters", {}), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise UserError(
            f"{where}: the parameters of {name} hold what JSON cannot: a date, a time, nan or inf", "write it as a text"
        ) from None
    if not isinstance(task.get("parameters", {}), dict) or len(parameters) > 2000:
        raise UserError(f"{where}: the parameters of {name} are not a table of at most 2000 characters")
    file = task.get("file")
    if (kind in catalogue.WITH_DATA) != isinstance(file, str):
        kinds = " or ".join(catalogue.WITH_DATA)
        raise UserError(
            f"{where}: {name}: a task of kind {kinds}, and no other, names its file", 'write file = "….jsonl"'
        )
    for key, of, form, example in (
        ("columns", catalogue.WITH_DATA, dict, 'columns = { question = "…" }'),
        ("skip", catalogue.WITH_DATA, bool, "skip = true"),
        ("package", ("package",), str, 'package = "…"'),
    ):
        if key in task and (kind not in of or not isinstance(task[key], form)):
            raise UserError(f"{where}: {name}: {key} is for tasks of kind {' or '.join(of)}", f"write {example}")
    columns = task.get("columns", {})
    if not all(isinstance(column, str) for column in columns.values()):
        raise UserError(f"{where}: {name}: columns does not name columns", 'write columns = { question = "…" }')
    chosen = task.get("set")
    if chosen is not None and (not isinstance(chosen, str) or not chosen):
        raise UserError(f"{where}: {name}: the set is not the path of a file", 'write set = "….txt"')
    version = catalogue.package_version(kind, parameters, name=name, of=task.get("package"))
    for path in (file, chosen):
        if path is not None and "\0" in path:
            raise UserError(f"{where}: {name}: {path!r} is not the path of a file")
    data = None
    if file is not None:
        source = conversion.Source(name, kind, parameters, (folder / file).absolute(), columns, task.get("skip", False))
        data, left_out = conversion.pinned(source)
        if notes is not None:
            notes += left_out
    return {
        "kind": kind,
        "name": name,
        "weight": weight,
        "parameters": parameters,
        "version": version,
        "data": None if data is None else str(data),
        "items": None if chosen is None else task_sets.read(folder / chosen).encode(),
    }


def policy(nodes: int) -> Policy:
    """The policy of a devnet that waits for ``nodes`` nodes before its first term.

    Its own nodes are named validators; a stranger who joins has to earn the reputation first.
    """
    return Policy(
        min_nodes=nodes,
        relays_min=1,
        relays_per_million=100_000,
        validators_min=1,
        validators_per_million=100_000,
        validator_reputation=EARNED_REPUTATION,
        audit_share=AUDIT_SHARE,
    )


@dataclass(frozen=True, slots=True)
class Founding:
    """What a new domain is to be.

    ``model`` is a Hugging Face folder, ``tasks`` a task table (``node.tasks.catalogue``), ``electors`` node ids, empty
    for the creator alone, ``dtype`` what nodes generate in. ``private``: weights travel encrypted, between nodes that
    joined. ``model_where`` is what a message about the model begins with.
    """

    name: str
    devnet: bool
    model: Path
    tasks: tuple[Mapping[str, Any], ...]
    recipe: Recipe
    timings: Timings
    policy: Policy
    thresholds: Thresholds = FLOAT32_THRESHOLDS
    dtype: str = "float32"
    electors: tuple[bytes, ...] = ()
    validators: tuple[bytes, ...] = ()
    private: bool = False
    model_where: str = "the model"


def devnet(*, name: str, nodes: int, tasks: str | None) -> Founding:
    """A devnet of the starter model. Raises ``UserError`` for tasks that are none."""
    return Founding(
        name=name,
        devnet=True,
        model=MODEL,
        tasks=tuple(task_rows(tasks)),
        recipe=defaults.RECIPE,
        timings=default_timings(devnet=True),
        policy=policy(nodes),
    )


def of_file(file: DomainFile, notes: list[str] | None = None) -> Founding:
    """The domain that a ``domain.toml`` describes; ``notes`` gets what was left out of its files.

    Raises ``UserError`` for tasks that cannot be.
    """
    return Founding(
        name=file.name,
        devnet=False,
        model=file.model,
        tasks=tuple(_row(task.values, file.folder, task.where, notes) for task in file.tasks),
        recipe=file.recipe,
        timings=file.timings,
        policy=file.policy,
        thresholds=file.thresholds,
        dtype=file.dtype,
        electors=file.electors,
        validators=file.validators,
        private=file.private,
        model_where=file.model_where,
    )


async def check(founding: Founding) -> None:
    """Ask each task for a few questions. Raises ``UserError`` for one that cannot be used."""
    try:
        await task_service.check(founding.tasks)
    except WorkerError as error:
        raise UserError(f"the tasks cannot be checked: {error}") from None


async def found(directory: DataDirectory, founding: Founding, *, checked: bool = False) -> Domain:
    """Make the domain with the key of ``directory`` as creator; what its genesis names lies there afterwards.

    ``checked`` says that ``check`` was called. Raises ``UserError`` for tasks or a model that cannot be used and for a
    disk without room.
    """
    size = _model_bytes(founding)
    directory.require_room(ROOM + 2 * size)
    scratch = directory.work / "version-0.bin"
    if not checked:
        await check(founding)
    try:
        model_files = await convert(founding.model, scratch, founding.dtype, size)
        _require_positions(founding, model_files.positions)
        genesis = await trio.to_thread.run_sync(_store, directory, founding, model_files, scratch)
    except WorkerError as error:
        if error.kind != "user":
            raise UserError(f"the model cannot be converted: {error}", "see farflung doctor") from None
        reason = str(error).removeprefix("engine: convert: ")
        raise UserError(f"{founding.model_where}: {reason}", "name another folder") from None
    except OSError as error:
        raise UserError(f"{directory.path}: the model cannot be stored ({error.strerror})", "free some room") from None
    directory.save_genesis(genesis)
    return parse_genesis(genesis)


async def convert(folder: Path, whole: Path, dtype: str, size: int) -> ConvertedModel:
    """Write the weights of a Hugging Face folder, of ``size`` bytes, as version 0's whole file. Returns what
    ``node.workers.weight_files.convert`` does. Raises ``WorkerError``, of kind "user" where the model is at fault."""
    async with open_worker("node.workers.engine_child", name="engine") as worker:
        request = ConvertModel(str(folder), str(whole), dtype)
        return await worker.call(request, timeout=CONVERT_TIMEOUT + size / CONVERT_SPEED)


def described(model_files: ConvertedModel, whole: Path) -> Manifest:
    """The manifest of what ``convert`` wrote. Raises ``OSError``."""
    with (
        whole.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        return Manifest.of_file(model_files.tensors, view, model_files.checksum)


def _model_bytes(founding: Founding) -> int:
    """Bytes of the weights in the model's folder.

    Raises ``UserError`` for a folder that lacks a file, and for a recipe that is too long for the model's positions.
    """
    where, folder = founding.model_where, founding.model
    if not folder.is_dir():
        raise UserError(f"{where}: {folder} is no folder", "name a Hugging Face model's folder")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UserError(f"{where}: there is no {name} in {folder}", "name a Hugging Face model's folder")
    try:
        positions = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        positions = None  # conversion says what is wrong with it
    _require_positions(founding, positions)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _require_positions(founding: Founding, positions: object) -> None:
    """Raise ``UserError`` for a recipe of longer sequences than the ``positions`` of a model that limits them."""
    longest = founding.recipe.max_prompt_tokens + founding.recipe.max_response_tokens
    if isinstance(positions, int) and longest > positions:
        raise UserError(
            f"{founding.model_where}: the model has {positions} positions, and prompts and responses take {longest} "
            "tokens",
            "lower recipe.max_prompt_tokens or recipe.max_response_tokens",
        )


def _store(directory: DataDirectory, founding: Founding, model_files: ConvertedModel, scratch: Path) -> bytes:
    blobs = BlobStore(directory.blobs)
    manifest = described(model_files, scratch)
    encoded = manifest.encode()
    VersionStore(directory.versions).adopt(encoded, scratch)
    model = Model(
        architecture=model_files.architecture,
        config=_blob(blobs, Path(model_files.config)),
        tokenizer=_blob(blobs, Path(model_files.tokenizer)),
        manifest=Blob(blobs.put(encoded), len(encoded)),
        whole=manifest.whole,
        compute_dtype=founding.dtype,
    )
    creator = directory.read_identity()
    try:
        return make_genesis(
            creator,
            name=founding.name,
            devnet=founding.devnet,
            private=founding.private,
            electors=founding.electors or (creator.node,),
            validators=founding.validators,
            model=model,
            tasks=tuple(_task(blobs, row) for row in founding.tasks),
            recipe=founding.recipe,
            timings=founding.timings,
            policy=founding.policy,
            thresholds=founding.thresholds,
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
    chosen = row["items"]
    items = None if chosen is None else Blob(blobs.put(chosen), len(chosen))
    return Task(row["kind"], row["name"], row["weight"], row["parameters"], row["version"], data, items)
