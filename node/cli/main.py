"""The command ``farflung``: one module a command, and one place where errors become exit codes.

0 done · 1 it ran and did not succeed · 2 a mistake of its user, told in one line · 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from node import __version__
from node.cli import (
    completion,
    credits,
    devnet,
    doctor,
    domain,
    identity,
    init,
    join,
    leave,
    log,
    peers,
    roles,
    run,
    service,
    status,
)
from node.errors import UserError

COMMANDS = (
    devnet,
    init,
    join,
    run,
    leave,
    status,
    peers,
    roles,
    credits,
    log,
    identity,
    domain,
    doctor,
    completion,
    service,
)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each command's module adds its own."""
    top = argparse.ArgumentParser(
        prog="farflung", description="Strangers' machines train one language model together.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"farflung {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    return top


def _user_error(error: BaseException) -> UserError | None:
    """The user's mistake that ``error`` stands for, where it stands for nothing else: trio wraps errors in groups."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        mistakes, others = error.split(UserError)
        return None if mistakes is None or others is not None else _user_error(mistakes.exceptions[0])
    return error if isinstance(error, UserError) else None


def _interrupted(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        chosen = parser().parse_args(arguments)
        code: int = chosen.command(chosen)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output went away (``farflung … | head``): what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        mistake = _user_error(error)
        if mistake is not None:
            # Imported here: most commands end without a mistake.
            from node import systemd

            line = f"farflung: {mistake}"
            print(systemd.for_journal(line, logging.ERROR) if systemd.is_journal(sys.stderr) else line, file=sys.stderr)
            return 2
        if _interrupted(error):
            return 130
        raise


if __name__ == "__main__":
    sys.exit(main())
