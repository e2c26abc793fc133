"""The files that a domain names, as they lie in a node's folder: for commands, which may run beside its daemon."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from node.errors import UserError
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from protocol.domain import Domain
from protocol.records import Blob


def path(directory: DataDirectory, blob: Blob) -> Path:
    """Where the file lies. Raises ``UserError`` where it is not here."""
    blobs = BlobStore(directory.blobs, owner=False)
    if not blobs.has(blob.hash):
        raise UserError(
            f"{directory.path}: a file that the domain names is not here yet",
            "let the node run until it has taken a role",
        )
    return blobs.path(blob.hash)


def task_rows(directory: DataDirectory, domain: Domain) -> list[dict[str, Any]]:
    """The domain's tasks as rows of ``node.tasks.catalogue``. Raises ``UserError`` where a file is missing."""
    return [
        {
            **asdict(task),
            "data": None if task.data is None else str(path(directory, task.data)),
            "items": None if task.items is None else path(directory, task.items).read_bytes(),
        }
        for task in domain.tasks
    ]
