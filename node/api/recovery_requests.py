"""The control socket's operations on recovery keys; all values are hexadecimal digits.

``{"op": "recovery", "commitment": …}`` lists the nodes whose join names that hash of a recovery key. ``{"op": "close",
"target": …, "recovery": …, "signature": …}`` and ``"rebind"`` append such an entry to the own feed: public key and
signature come from the command, which alone sees the words.
"""

from __future__ import annotations

import json
from typing import Any, Final

from node.context import Node
from node.log.replicated_log import NotReady
from protocol.errors import LocalError, PeerError
from protocol.log.recovery import check, commitment
from protocol.records import Close, Rebind

PATIENCE: Final = 8.0
"""Seconds until the entry must stand; the command waits a little longer for the answer."""


async def answer(node: Node, line: bytes) -> dict[str, Any] | None:
    """The answer to a request, None where it is for somebody else."""
    try:
        request = json.loads(line)
        match request:
            case {"op": "recovery", "commitment": str(digest)}:
                return {"nodes": rows(node, bytes.fromhex(digest))}
            case {
                "op": ("close" | "rebind") as kind,
                "target": str(target),
                "recovery": str(key),
                "signature": str(by),
            }:
                record = (Close if kind == "close" else Rebind)(*map(bytes.fromhex, (target, key, by)))
                return await _append(node, record)
    except (ValueError, RecursionError):
        pass
    return None


def rows(node: Node, digest: bytes) -> list[dict[str, Any]]:
    """The nodes that committed to this key: the height at which each one's feed ended, and who went on for it."""
    replica, ledger = node.log.replica, node.log.ledger
    found = []
    for author in ledger.authors():
        if replica.commitments.get(author) == digest:
            ending = replica.endings.ended.get(author)
            successor = None if ending is None or ending.successor is None else ending.successor.hex()
            height = None if ending is None else ending.height
            row = {"node": author.hex(), "name": ledger.name(author), "ended": height, "successor": successor}
            found.append(row)
    return found


async def _append(node: Node, record: Close | Rebind) -> dict[str, Any]:
    try:
        check(record, node.domain.id, node.id)
    except PeerError as error:
        return {"error": str(error)}
    if node.log.replica.commitments.get(record.target) != commitment(record.recovery):
        return {"error": f"{record.target.hex()} did not name this recovery key when it joined"}
    try:
        (made,) = await node.log.append(record, timeout=PATIENCE)
    except (NotReady, LocalError, OSError) as error:
        return {"error": str(error)}
    return {"entry": made.id.hex(), "seq": made.seq}
