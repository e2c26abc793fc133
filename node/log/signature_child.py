"""The child process that checks signatures. Run as ``python -P -m node.log.signature_child FD``.

It answers ``node.log.signature_check.CheckSignatures``, and holds no keys and no state.
"""

from __future__ import annotations

from node.log.signature_check import CheckSignatures, check
from node.workers import child_loop


def answer(request: CheckSignatures) -> list[bool]:
    """The operation."""
    return check(request.checks)


if __name__ == "__main__":
    child_loop.run(lambda: [answer])
