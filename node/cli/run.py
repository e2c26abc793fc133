"""``farflung run``: the daemon of one data directory, until it is told to stop."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal

from node.cli import options
from node.cli.terminal import end_process
from node.errors import UserError

_PR_SET_PDEATHSIG = 1


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    parser = options.add_command(commands, "run", _run, help=phrase)
    parser.add_argument(
        "--die-with-parent", action="store_true", help="stop when the process that started this one is gone"
    )
    options.add_config(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Run the node of a data directory until SIGTERM or Ctrl-C. The directory is made where it is missing; its
    farflung.toml says where to listen and whom to ask first."""
    if arguments.die_with_parent:
        _die_with_parent()
    directory = options.data_directory(arguments)
    config = options.configuration(arguments, directory)
    # Imported here: the network stack takes a second to load, which no other command should pay.
    from node import daemon

    daemon.run(directory, config)
    end_process(0)


def _die_with_parent() -> None:
    """Have the kernel send SIGTERM once the parent is gone. Linux prctl(2)."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise UserError(f"--die-with-parent: {os.strerror(ctypes.get_errno())}", "run without it")
    if os.getppid() != parent:  # it went before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)
