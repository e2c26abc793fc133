"""Errors of the world outside the protocol.

1. A ``UserError`` is something its user can put right: a busy port, an unreadable key, a full disk. Its text is
   one line that names the thing and the remedy. A command prints it and exits with 2, without a traceback.
2. It is raised at start only: a node that runs pauses or retries instead.
"""

from __future__ import annotations

from typing import ClassVar

from protocol.errors import Error


class UserError(Error):
    """Something the user can put right; the message is one line with the remedy.

    ``problem`` names the thing that is wrong, ``remedy`` what to do about it, where that is not said already.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(" ".join((f"{problem}; {remedy}" if remedy else problem).split()))
