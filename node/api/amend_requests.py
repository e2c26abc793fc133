"""Amendments over the control socket: what is in force, the own elector's signature, and carrying one into the log.

``amend`` tells the newest number, electors and thresholds in force; ``amend_sign`` has the node's elector sign;
``amend_submit`` appends the entry.
"""

from __future__ import annotations

from typing import Final

from node.api.control_requests import Answer, Panel, Request, octets
from node.errors import Refused
from protocol.errors import PeerError
from protocol.log.amendment import Amendment

WHAT: Final = "the amendment"


class ShowAmendments(Request, tag="amend"):
    """What is in force."""

    async def answer(self, panel: Panel) -> Answer:
        replica = panel.node.log.replica
        height = len(replica.cuts) + 1
        return {
            "domain": panel.node.domain.id.hex(),
            "number": replica.amendments.number,
            "electors": [elector.hex() for elector in replica.electors_at(height)],
            "thresholds": replica.thresholds_at(height).to_value(),
        }


class SignAmendment(Request, tag="amend_sign"):
    """Have the node's elector sign."""

    body: str

    async def answer(self, panel: Panel) -> Answer:
        amendment, elector = _parse(panel, self.body), panel.elector.elector
        if elector is None or not elector.voter.elected:
            raise Refused("this node is no elector of the domain")
        signature = await elector.voter.sign_amendment(amendment)
        if isinstance(signature, str):
            raise Refused(f"the elector does not sign: {signature}")
        return {"elector": panel.node.id.hex(), "signature": signature.hex()}


class SubmitAmendment(Request, tag="amend_submit"):
    """Append an amendment with its signatures by elector."""

    body: str
    votes: dict[str, str]

    async def answer(self, panel: Panel) -> Answer:
        replica, amendment = panel.node.log.replica, _parse(panel, self.body)
        votes = {octets(elector, WHAT): octets(vote, WHAT) for elector, vote in self.votes.items()}
        if amendment.number != replica.amendments.number + 1:
            raise Refused(f"the next amendment has number {replica.amendments.number + 1}")
        payload = amendment.payload(votes)
        amendment.verify(payload.votes, replica.electors_at(len(replica.cuts) + 1))
        (entry,) = await panel.node.log.append(payload, timeout=5)
        return {"seq": entry.seq, "id": entry.id.hex()}


def _parse(panel: Panel, body: str) -> Amendment:
    amendment = Amendment.parse(octets(body, WHAT))
    if amendment.domain != panel.node.domain.id:
        raise PeerError("amendment: it belongs to another domain")
    return amendment
