"""The control socket's operations on recovery keys.

``recovery`` lists the nodes whose join names that hash of a recovery key. ``close`` and ``rebind`` append such an entry
to the own feed: public key and signature come from the command, which alone sees the words.
"""

from __future__ import annotations

from typing import Any, Final

from node.api import control_requests
from node.api.control_requests import Answer, Handler, Panel, Request, octets
from node.context import Node
from node.errors import Refused
from protocol.log.recovery import check, commitment
from protocol.records import Close, Rebind

PATIENCE: Final = 8.0
"""Seconds until the entry must stand; the command waits a little longer for the answer."""


async def _show(panel: Panel, request: control_requests.ShowRecovery) -> Answer:
    return {"nodes": rows(panel.node, octets(request.commitment, "the commitment"))}


async def _end(panel: Panel, request: control_requests.Ending) -> Answer:
    node, kind = panel.node, Close if isinstance(request, control_requests.CloseFeed) else Rebind
    values = (request.target, request.recovery, request.signature)
    record = kind(*(octets(value, "the statement") for value in values))
    check(record, node.domain.id, node.id)
    if node.log.replica.commitments.get(record.target) != commitment(record.recovery):
        raise Refused(f"{record.target.hex()} did not name this recovery key when it joined")
    (made,) = await node.log.append(record, timeout=PATIENCE)
    return {"entry": made.id.hex(), "seq": made.seq}


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


HANDLERS: Final[dict[type[Request], Handler]] = {
    control_requests.ShowRecovery: _show,
    control_requests.CloseFeed: _end,
    control_requests.RebindFeed: _end,
}
