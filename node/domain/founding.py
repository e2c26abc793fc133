"""Founding a domain: the signed genesis in the founder's data directory, and version 0 beside it.

A devnet and ``farflung domain create`` differ in the ``Founding`` that they ask for, and in nothing else.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import trio

from node import starter
from node.domain import task_tables
from node.domain.domain_toml import EARNED_REPUTATION, Founding, new_policy
from node.errors import UserError
from node.starter import defaults
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from node.store.version_store import VersionStore
from node.tasks import task_service
from node.workers.child_messages import ConvertedModel, ConvertModel
from node.workers.child_process import WorkerError, open_worker
from protocol.constants import MAX_BLOB_BYTES
from protocol.domain import Domain, Model, Task, default_timings, make_genesis, parse_genesis
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


def devnet(*, name: str, nodes: int, tasks: str | None) -> Founding:
    """A devnet of the starter model that waits for ``nodes`` nodes before its first term.

    Its own nodes are named validators; a stranger who joins has to earn the reputation first. Raises
    ``UserError`` for tasks that are none.
    """
    return Founding(
        name=name,
        devnet=True,
        model=MODEL,
        tasks=tuple(task_tables.named(tasks)),
        recipe=defaults.RECIPE,
        timings=default_timings(devnet=True),
        policy=new_policy(nodes, EARNED_REPUTATION),
    )


Convert = Callable[[Path, Path, str, int], Awaitable[ConvertedModel]]
"""Writes a folder's weights as a whole file: ``convert_model``, or what stands in for it."""


async def check(founding: Founding) -> None:
    """Ask each task for a few questions. Raises ``UserError`` for one that cannot be used."""
    try:
        await task_service.check(founding.tasks)
    except WorkerError as error:
        raise UserError(f"the tasks cannot be checked: {error}") from None


async def convert_model(folder: Path, whole: Path, dtype: str, size: int) -> ConvertedModel:
    """Write the weights of a Hugging Face folder, of ``size`` bytes, as version 0's whole file. Returns what
    ``node.workers.architectures.convert`` does. Raises ``WorkerError``, of kind "user" where the model is at
    fault."""
    async with open_worker("node.workers.engine_child", name="engine") as worker:
        request = ConvertModel(str(folder), str(whole), dtype)
        return await worker.call(request, timeout=CONVERT_TIMEOUT + size / CONVERT_SPEED)


async def found(directory: DataDirectory, founding: Founding, convert: Convert = convert_model) -> Domain:
    """Make the domain with the key of ``directory`` as creator; what its genesis names lies there afterwards.

    Its tasks are what ``check`` found usable. Raises ``UserError`` for a model that cannot be used and for a disk
    without room.
    """
    size = _model_bytes(founding)
    directory.require_room(ROOM + 2 * size)
    scratch = directory.work / "version-0.bin"
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


def described(model_files: ConvertedModel, whole: Path) -> Manifest:
    """The manifest of what ``convert_model`` wrote. Raises ``OSError``."""
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
            trainers=founding.trainers,
            admission=founding.admission,
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
