"""The control socket's operations on recovery keys.

``recovery`` lists the nodes whose join names that hash of a recovery key. ``close`` and ``rebind`` append such an entry
to the own feed: public key and signature come from the command, which alone sees the words.
"""

from __future__ import annotations

from typing import ClassVar, Final

from node.api.control_requests import Answer, Panel, Request, octets
from node.errors import Refused
from protocol.log.recovery import check, commitment
from protocol.records import Close, Rebind

PATIENCE: Final = 8.0
"""Seconds until the entry must stand; the command waits a little longer for the answer."""


class ShowRecovery(Request, tag="recovery"):
    """The nodes that committed to a recovery key: the height at which each one's feed ended, and who went on for it."""

    commitment: str

    async def answer(self, panel: Panel) -> Answer:
        replica, ledger = panel.node.log.replica, panel.node.log.ledger
        digest, found = octets(self.commitment, "the commitment"), []
        for author in ledger.authors():
            if replica.commitments.get(author) == digest:
                ending = replica.endings.ended.get(author)
                successor = None if ending is None or ending.successor is None else ending.successor.hex()
                height = None if ending is None else ending.height
                row = {"node": author.hex(), "name": ledger.name(author), "ended": height, "successor": successor}
                found.append(row)
        return {"nodes": found}


class Ending(Request):
    """A statement of a recovery key on a feed."""

    target: str
    recovery: str
    signature: str
    record: ClassVar[type[Close | Rebind]]

    async def answer(self, panel: Panel) -> Answer:
        node, values = panel.node, (self.target, self.recovery, self.signature)
        record = self.record(*(octets(value, "the statement") for value in values))
        check(record, node.domain.id, node.id)
        if node.log.replica.commitments.get(record.target) != commitment(record.recovery):
            raise Refused(f"{record.target.hex()} did not name this recovery key when it joined")
        (made,) = await node.log.append(record, timeout=PATIENCE)
        return {"entry": made.id.hex(), "seq": made.seq}


class CloseFeed(Ending, tag="close"):
    """End a feed."""

    record = Close


class RebindFeed(Ending, tag="rebind"):
    """Let its account go on under this node's key."""

    record = Rebind
