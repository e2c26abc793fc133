"""One check of a signature as a value, and the making of many, here or in a child. Imports no trio."""

from __future__ import annotations

from collections.abc import Sequence

from node.workers.frames import ChildRequest
from protocol.errors import PeerError
from protocol.identity import verify

Check = tuple[bytes, bytes, bytes, bytes]
"""(node, context, message, signature), as ``protocol.identity.verify`` takes them."""


def check(checks: Sequence[Check]) -> list[bool]:
    """Whether each signature is right; about 70 µs each."""
    found = []
    for node, context, message, signature in checks:
        try:
            verify(node, context, message, signature)
        except PeerError:
            found.append(False)
        else:
            found.append(True)
    return found


class CheckSignatures(ChildRequest[list[bool]], frozen=True, tag="check"):
    """Asks the child whether each signature is right."""

    checks: list[Check]
