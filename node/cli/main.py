"""The command ``farflung``: one module a command, and one place where errors become exit codes.

0 done · 1 it ran and did not succeed · 2 a mistake of its user, told in one line · 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from node import __version__
from node.errors import UserError

if TYPE_CHECKING:
    import argparse


def commands() -> tuple[ModuleType, ...]:
    """The modules of all commands, in the order of the help.

    Imported here and not above, as argparse is below: a Ctrl-C that comes while they load is ``main``'s to catch.
    """
    from node.cli import (
        completion,
        credits,
        devnet,
        doctor,
        domain,
        eval,
        identity,
        init,
        join,
        leave,
        log,
        peers,
        proofs,
        roles,
        run,
        service,
        status,
        tasks,
        weights,
    )

    return (
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
        weights,
        eval,
        identity,
        domain,
        tasks,
        proofs,
        doctor,
        completion,
        service,
    )


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each command's module adds its own."""
    import argparse

    top = argparse.ArgumentParser(
        prog="farflung", description="Strangers' machines train one language model together.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"farflung {__version__}")
    added = top.add_subparsers(metavar="COMMAND", required=True)
    for command in commands():
        command.add_to(added)
    return top


def _user_error(error: BaseException) -> UserError | None:
    """The user's mistake that ``error`` stands for, where it stands for nothing else: trio wraps errors in groups."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        mistakes, others = error.split(UserError)
        return None if mistakes is None or others is not None else _user_error(mistakes.exceptions[0])
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        # Whatever was being written, standard output included, only the user can make room for it.
        return UserError(f"{error.filename or 'the output'}: {error.strerror}", "make room and try again")
    return error if isinstance(error, UserError) else None


def _interrupted(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)


def _mend_streams() -> None:
    """Make standard input, output and error exist (not so after ``>&-``) and take every character (in any locale)."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            try:
                os.fstat(descriptor)
            except OSError:
                # The lowest free number is this one. Left free, the next file would get it, and what a library prints.
                os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _abandon_output() -> None:
    """Let what is still buffered for standard output go nowhere: Python would complain of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _mend_streams()
    try:
        chosen = parser().parse_args(arguments)
        code: int = chosen.command(chosen)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output went away (``farflung … | head``).
        _abandon_output()
        return 1
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        mistake = _user_error(error)
        if mistake is not None:
            # Imported here: most commands end without a mistake.
            import logging

            from node.systemd import service_manager

            line = f"farflung: {mistake}"
            print(
                service_manager.for_journal(line, logging.ERROR) if service_manager.is_journal(sys.stderr) else line,
                file=sys.stderr,
            )
            if isinstance(error, OSError):
                _abandon_output()
            return 2
        if _interrupted(error):
            return 130
        raise


if __name__ == "__main__":
    sys.exit(main())
