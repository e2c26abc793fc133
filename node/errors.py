"""Errors of the world outside the protocol.

1. A ``UserError`` is something its user can put right: a busy port, an unreadable key, a full disk. Its text is
   one line that names the thing and the remedy. A command prints it and exits with 2, without a traceback.
2. It is raised at start only: a node that runs pauses or retries instead.
3. ``Unreachable`` is nobody's fault: ask elsewhere, or later. A fault of a peer's is a ``PeerError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import Error


class UserError(Error):
    """Something the user can put right.

    ``message`` names the thing and what is wrong with it, ``remedy`` says what to do; where the message already
    says both, the remedy is left out.
    """

    def __init__(self, message: str, remedy: str | None = None) -> None:
        text = message if remedy is None else f"{message}; {remedy}"
        # One line, whatever an operating system or a parser put into the message.
        super().__init__(" ".join(text.split()))
        self.remedy = remedy


@contextmanager
def os_errors(path: Path, problem: str, remedy: str) -> Iterator[None]:
    """Make an ``OSError`` the ``UserError`` "PATH: PROBLEM (reason)" with the ``remedy``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {problem} ({error.strerror})", remedy) from None


class Unreachable(Error):
    """The peer is not connected, does not speak the protocol, is too slow or hung up. Nobody's fault: ask elsewhere."""


class Refused(Unreachable):
    """The peer answered that it will not or cannot serve this request; the text is its reason."""


class Busy(Refused):
    """The peer has no room for us at the moment. ``retry_after`` are the seconds that it is to be left alone."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def innermost(error: BaseException) -> BaseException:
    """What happened, without the groups that trio wraps it in: the first of several."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
