"""The command ``farflung``: one module a command, and one place where errors become exit codes.

0 done · 1 it ran and did not succeed · 2 a mistake of its user, told in one line · 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from node import __version__
from node.errors import UserError

if TYPE_CHECKING:
    import argparse

    from node.cli.terminal import Terminal

COMMANDS: Final = {
    "devnet": "run a whole network on this machine",
    "init": "make a node's folder and key",
    "join": "join a domain by the address of one of its nodes",
    "run": "run a node",
    "leave": "leave the domain and stop the node",
    "status": "what the node does and how it is",
    "peers": "the node's peers",
    "roles": "who plays which role",
    "credits": "what everybody earned",
    "log": "check, show or export a node's log",
    "weights": "list, clean up, fetch or export versions of the weights",
    "eval": "measure versions of the weights on held-out questions",
    "identity": "the node's key: show, export, import, recover",
    "domain": "found a domain, or show one",
    "tasks": "what tasks this machine can serve",
    "proofs": "replay a verdict, or calibrate limits",
    "doctor": "find out what keeps a node from working",
    "completion": "a script that completes commands in bash or zsh",
    "service": "run the node as a systemd service",
}
"""The commands in the order of the help. Each has a module of its name, whose ``add_to`` adds its parser."""


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; where one is ``chosen``, only that one's is whole and its module loaded."""
    # Imported here and not above: a Ctrl-C that comes while they load is ``main``'s to catch.
    import argparse
    from importlib import import_module

    top = argparse.ArgumentParser(
        prog="farflung", description="Strangers' machines train one language model together.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"farflung {__version__}")
    added = top.add_subparsers(metavar="COMMAND", required=True)
    for name, phrase in COMMANDS.items():
        if chosen in (None, name):
            import_module(f"node.cli.{name}").add_to(added, phrase)
        else:
            added.add_parser(name, help=phrase)
    return top


def _line_and_code(error: BaseException) -> tuple[str, int] | None:
    """The line and the exit code that ``error`` comes to, None for a bug: trio wraps errors in groups."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        mistakes, others = error.split(UserError)
        return None if mistakes is None or others is not None else _line_and_code(mistakes.exceptions[0])
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        # Whatever was being written, standard output included, only the user can make room for it.
        return f"{error.filename or 'the output'}: {error.strerror}; make room and try again", 2
    if isinstance(error, UserError):
        return str(error), 2
    from node.api.control_client import Unavailable

    return (" ".join(str(error).split()), 1) if isinstance(error, Unavailable) else None


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


def main(arguments: Sequence[str] | None = None, *, terminal: Terminal | None = None) -> int:
    """Run one command and return its exit code; ``terminal`` stands in for the one at standard input and output."""

    def run() -> int:
        from node.cli.terminal import Terminal

        words = sys.argv[1:] if arguments is None else list(arguments)
        chosen = parser(words[0] if words else "").parse_args(words)
        chosen.terminal, chosen.whole_parser = terminal or Terminal(), parser
        code: int = chosen.command(chosen)
        return code

    return exit_code(run)


def exit_code(run: Callable[[], int]) -> int:
    """The exit code of a command that ``run`` carries out; what it raises is told, unless it is a bug."""
    _mend_streams()
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output went away (``farflung … | head``).
        _abandon_output()
        return 1
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        if _interrupted(error):
            return 130
        outcome = _line_and_code(error)
        if outcome is None:
            raise
        # Imported here: most commands end without a mistake.
        import logging

        from node.systemd import service_manager

        line = f"farflung: {outcome[0]}"
        print(
            service_manager.for_journal(line, logging.ERROR) if service_manager.is_journal(sys.stderr) else line,
            file=sys.stderr,
        )
        if isinstance(error, OSError):
            _abandon_output()
        return outcome[1]


if __name__ == "__main__":
    sys.exit(main())
