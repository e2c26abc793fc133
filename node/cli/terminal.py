"""Whoever sits at the terminal, and the end of a command's process.

Commands take the terminal from ``arguments.terminal``: ``main`` puts it there, and tests put another one in its place.
"""

from __future__ import annotations

import getpass
import logging
import os
import sys
from typing import NoReturn

from node.errors import UserError


class Terminal:
    """Standard input and output, as far as a person is there."""

    def listens(self) -> bool:
        """Whether somebody can be asked."""
        return sys.stdin.isatty()

    def shows(self) -> bool:
        """Whether somebody reads the output as it comes."""
        return sys.stdout.isatty()

    def ask(self, question: str) -> str:
        """What is answered to ``question``. Raises ``EOFError``."""
        return input(question)

    def ask_hidden(self, question: str) -> str:
        """The same, without echo."""
        return getpass.getpass(question)

    def agreed(self, question: str) -> bool:
        """Whether the answer to ``question`` is yes."""
        try:
            answer = self.ask(f"{question} [y/N] ")
        except EOFError:
            print()
            return False
        return answer.strip().lower() in ("y", "yes")

    def secret(self, what: str, question: str, remedy: str) -> str:
        """A secret that is asked for. Raises ``UserError`` with ``remedy`` where nobody can be."""
        if not self.listens():
            raise UserError(f"there is no terminal to ask for {what} on", remedy)
        return self.ask_hidden(question)


def end_process(code: int) -> NoReturn:
    """End this process now, once what it said is written.

    Taking an interpreter with the network stack apart costs ten times the processor time that stopping the daemon
    does, and waits for threads whose work is wanted no more. Raises ``BrokenPipeError`` where nobody reads.
    """
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)
