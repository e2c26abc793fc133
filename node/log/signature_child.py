"""The child process that checks signatures. Run as ``python -P -m node.log.signature_child FD``.

Operation (``node.workers.frames``): ``check{checks: [node, context, message, signature, …]}`` → ``{right: a byte for
each four, 1 where the signature is right, else 0}``. It holds no keys and no state.
"""

from __future__ import annotations

from typing import Any

from node.log.signature_check import check
from node.workers import child_loop


def answer(checks: list[bytes]) -> dict[str, Any]:
    """The operation."""
    nodes, contexts, messages, signatures = (checks[place::4] for place in range(4))
    return {"right": bytes(check(list(zip(nodes, contexts, messages, signatures, strict=True))))}


if __name__ == "__main__":
    child_loop.run(lambda: {"check": answer})
