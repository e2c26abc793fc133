"""``farflung run``: the daemon of one data directory, until it is told to stop."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
from pathlib import Path

from node.errors import UserError
from node.store.directory import DataDirectory

_PR_SET_PDEATHSIG = 1


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "run",
        help="run a node",
        description="Run the node of a data directory until SIGTERM or Ctrl-C. The directory is made where it is "
        "missing; its farflung.toml says where to listen and whom to ask first.",
    )
    parser.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help="the node's folder")
    parser.add_argument(
        "--die-with-parent", action="store_true", help="stop when the process that started this one is gone"
    )
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.die_with_parent:
        _die_with_parent()
    # Imported here: the network stack takes a second to load, which no other command should pay.
    from node import daemon

    daemon.run(DataDirectory(arguments.data_dir))
    return 0


def _die_with_parent() -> None:
    """Have the kernel send SIGTERM once the parent is gone. Linux prctl(2)."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise UserError(f"--die-with-parent: {os.strerror(ctypes.get_errno())}", "run without it")
    if os.getppid() != parent:  # it went before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)
