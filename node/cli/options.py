"""What commands share: their parsers, the node's folder, its configuration, and output for programs.

A command that works on a node finds its folder in this order: ``--data-dir``, the variable ``FARFLUNG_DATA_DIR``, the
service's ``/var/lib/farflung`` where this user can read it, ``~/.local/share/farflung/node``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import shtab

from node.config import ENGINES, KEYS, Config, resolve
from node.errors import UserError
from node.store.data_directory import DataDirectory

SERVICE_DATA: Final = Path("/var/lib/farflung")
USER_DATA: Final = Path(".local/share/farflung/node")
"""A user's own node, below the home directory."""

LISTS: Final = ("listen", "bootstrap")
"""Keys whose flag is given once an item; the items of other lists stand in one flag, with commas."""


Values: TypeAlias = dict[str, Any]
"""Named values that JSON can hold: an answer of a daemon, or what ``--json`` prints."""

if TYPE_CHECKING:
    Parsers: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
    """Where the parsers of commands, or of a command's actions, are added."""


def add_command(
    parsers: Parsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    data_dir: bool = True,
    json: bool = False,
) -> argparse.ArgumentParser:
    """Add the parser of a command, or of an action, that ``run`` carries out and returns the exit code of.

    The first paragraph of what is written about ``run`` describes the command to its users.
    """
    about = " ".join((run.__doc__ or "").partition("\n\n")[0].split())
    parser = parsers.add_parser(name, help=help, description=about or None)
    if data_dir:
        add_folder(
            parser,
            "--data-dir",
            type=str,
            help="the node's folder (default: $FARFLUNG_DATA_DIR, else /var/lib/farflung where this user can read it, "
            "else ~/.local/share/farflung/node)",
        )
    if json:
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(command=run)
    return parser


def add_group(parsers: Parsers, name: str, *, help: str, description: str, metavar: str = "ACTION") -> Parsers:
    """Add a command that has actions; returns where they are added."""
    return parsers.add_parser(name, help=help, description=description).add_subparsers(metavar=metavar, required=True)


def add_file(parser: argparse._ActionsContainer, *names: str, metavar: str = "FILE", **settings: Any) -> None:
    """Add an argument that is a file's path, with the ``settings`` of argparse; shells complete it."""
    action = parser.add_argument(*names, **{"type": Path, "metavar": metavar, **settings})
    action.complete = shtab.FILE  # type: ignore[attr-defined]


def add_folder(parser: argparse._ActionsContainer, *names: str, metavar: str = "DIR", **settings: Any) -> None:
    """The same for a folder's path."""
    action = parser.add_argument(*names, **{"type": Path, "metavar": metavar, **settings})
    action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]


def add_number(parser: argparse._ActionsContainer, *names: str, metavar: str = "N", **settings: Any) -> None:
    """Add an argument that is a whole number."""
    parser.add_argument(*names, **{"type": int, "metavar": metavar, **settings})


def add_engine(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--engine`` and ``--threads`` of a command that generates by itself."""
    parser.add_argument("--engine", choices=ENGINES, help=f"what generates (default: {default})")
    add_number(parser, "--threads", help=f"threads that compute (default: {default})")


def check_threads(arguments: argparse.Namespace) -> None:
    """Raise ``UserError`` for a number of ``--threads`` that cannot be."""
    if arguments.threads is not None and arguments.threads < 1:
        raise UserError(f"--threads {arguments.threads}: expected 1 or more")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and the flags of the configuration's keys."""
    group = parser.add_argument_group("configuration")
    about = "the configuration (default: $FARFLUNG_CONFIG, else farflung.toml in the node's folder)"
    add_file(group, "--config", help=about)
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


def data_directory(arguments: argparse.Namespace, service: Path = SERVICE_DATA) -> DataDirectory:
    """The node's folder that the command is about; it need not exist."""
    given: str | Path | None = arguments.data_dir
    if given == "":  # of a variable that is not set; it would mean the present folder
        raise UserError("--data-dir: the name is empty", "name a folder")
    if given is not None:
        return DataDirectory(given)
    if variable := os.environ.get("FARFLUNG_DATA_DIR"):
        return DataDirectory(variable)
    if os.access(service, os.R_OK | os.X_OK):
        return DataDirectory(service)
    try:
        return DataDirectory(Path.home() / USER_DATA)
    except RuntimeError:
        raise UserError("this user has no home directory", "name the node's folder with --data-dir") from None


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


def show(arguments: argparse.Namespace, found: Values, for_people: Callable[[], None]) -> None:
    """Print what a command ``found``: one JSON object where ``--json`` asks for it, else what ``for_people`` prints."""
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for_people()


def note(text: str) -> None:
    """A remark for people, apart from the output."""
    print(f"farflung: {text}", file=sys.stderr)


def counted(count: int, noun: str) -> str:
    """``count`` things for people: "1 error", "2 errors"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
