"""Options that several commands share: the node's folder, its configuration, and output for programs.

A command that works on a node finds its folder in this order: ``--data-dir``, the variable ``FARFLUNG_DATA_DIR``, the
service's ``/var/lib/farflung`` where this user can read it, ``~/.local/share/farflung/node``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import shtab

from node.config import KEYS, Config, resolve
from node.errors import UserError
from node.store.data_directory import DataDirectory

SERVICE_DATA: Final = Path("/var/lib/farflung")
USER_DATA: Final = Path(".local/share/farflung/node")
"""A user's own node, below the home directory."""

LISTS: Final = ("listen", "bootstrap")
"""Keys whose flag is given once an item; the items of other lists stand in one flag, with commas."""


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    """Add ``--data-dir``."""
    complete(
        parser.add_argument(
            "--data-dir",
            metavar="DIR",
            help="the node's folder (default: $FARFLUNG_DATA_DIR, else /var/lib/farflung where this user can read it, "
            "else ~/.local/share/farflung/node)",
        ),
        shtab.DIRECTORY,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and the flags of the configuration's keys."""
    group = parser.add_argument_group("configuration")
    complete(
        group.add_argument(
            "--config",
            type=Path,
            metavar="FILE",
            help="the configuration (default: $FARFLUNG_CONFIG, else farflung.toml in the node's folder)",
        ),
        shtab.FILE,
    )
    for name, key in KEYS.items():
        if "." in name:
            continue
        several = "; may be given several times" if name in LISTS else ", with commas" if name == "willing" else ""
        group.add_argument(
            key.flag,
            dest=f"key_{name}",
            action="append" if name in LISTS else "store",
            metavar="ADDRESS" if name in LISTS else "ROLES" if name == "willing" else name.upper(),
            help=f"{key.meaning}{several}",
        )


def complete(action: argparse.Action, how: object) -> None:
    """Tell shell completion what an argument is."""
    action.complete = how  # type: ignore[attr-defined]


def data_directory(arguments: argparse.Namespace) -> DataDirectory:
    """The node's folder that the command is about; it need not exist."""
    given: str | Path | None = arguments.data_dir
    if given == "":  # of a variable that is not set; it would mean the present folder
        raise UserError("--data-dir: the name is empty", "name a folder")
    if given is not None:
        return DataDirectory(given)
    if variable := os.environ.get("FARFLUNG_DATA_DIR"):
        return DataDirectory(variable)
    if os.access(SERVICE_DATA, os.R_OK | os.X_OK):
        return DataDirectory(SERVICE_DATA)
    return DataDirectory(_home() / USER_DATA)


def existing_directory(arguments: argparse.Namespace) -> DataDirectory:
    """The same, for a command that needs a node to be there. Raises ``UserError``."""
    directory = data_directory(arguments)
    try:
        directory.path.stat()
        if directory.exists() or directory.genesis_file.exists():
            return directory
    except PermissionError:
        raise UserError(f"{directory.path}: cannot be read by this user", "run as its owner") from None
    except OSError:
        pass
    raise UserError(f"{directory.path}: no node lives here", "name its folder with --data-dir, or farflung join")


def config_file(arguments: argparse.Namespace, directory: DataDirectory) -> tuple[Path, bool]:
    """The configuration's file, and whether the user named it."""
    given: Path | None = arguments.config
    if given is not None:
        return given.absolute(), True
    if variable := os.environ.get("FARFLUNG_CONFIG"):
        return Path(variable).absolute(), True
    return directory.config_file, False


def flags(arguments: argparse.Namespace) -> dict[str, object]:
    """The configuration's keys that the command line sets."""
    values: dict[str, object] = {}
    for name, key in KEYS.items():
        given = getattr(arguments, f"key_{name}", None)
        if given is not None:
            values[name] = given if isinstance(given, list) else key.decode(given)
    return values


def configuration(arguments: argparse.Namespace, directory: DataDirectory, *, may_lack: bool = False) -> Config:
    """The configuration from flags, environment and file. Raises ``UserError``.

    A file that the user named must exist unless ``may_lack`` is set.
    """
    path, named = config_file(arguments, directory)
    return resolve(path, required=named and not may_lack, environment=os.environ, flags=flags(arguments))


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    print(json.dumps(value, indent=1))


def note(text: str) -> None:
    """A remark for people, apart from the output."""
    print(f"farflung: {text}", file=sys.stderr)


def counted(count: int, noun: str) -> str:
    """``count`` things for people: "1 error", "2 errors"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise UserError("this user has no home directory", "name the node's folder with --data-dir") from None
