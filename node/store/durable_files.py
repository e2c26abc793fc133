"""Small files: those that the user named, read with a bound; durable ones, written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from node.errors import UserError, os_errors


def sync_directory(path: Path) -> None:
    """Make the names in the folder ``path`` durable (a rename is not until its folder is synced)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(descriptor: int, data: bytes) -> None:
    """Write ``data`` to the open file, make it durable, and close it."""
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace the file ``path`` by ``data``, durably; readers see the old or the new content, never a part.

    Raises ``OSError``; then ``path`` is what it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        write_synced(descriptor, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_named(path: Path, most: int, remedy: str) -> bytes:
    """The beginning of a file that the user named, one byte more than ``most`` where it is longer.

    Raises ``UserError`` with ``remedy`` where it cannot be read.
    """
    with os_errors(path, "cannot be read", remedy), path.open("rb") as file:
        return file.read(most + 1)


def read_text(path: Path, remedy: str, *, most: int = 1 << 24) -> str:
    """The same of a text in UTF-8. A byte order mark, which some editors put in front, is left out."""
    data = read_named(path, most, remedy)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line}: not UTF-8 text", "save the file as UTF-8") from None


def write_new(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file that was not there before, durably. Raises ``UserError``: the user named the file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise UserError(f"{path}: it is there already and is not overwritten", "name another file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be made ({error.strerror})", "name another file") from None
    try:
        write_synced(descriptor, data)
        sync_directory(path.absolute().parent)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written ({error.strerror})", "free some room or name another file"
        ) from None
