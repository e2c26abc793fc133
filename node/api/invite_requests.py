"""Invitations over the control socket: ``invite`` puts one into this node's feed."""

from __future__ import annotations

from node.api.control_requests import Answer, Panel, Request, octets
from node.errors import Refused
from protocol.errors import PeerError
from protocol.records import Invite


class PutInvitation(Request, tag="invite"):
    """Let up to ``uses`` nodes in that the key (hex) signs for, within ``cuts`` cuts; no uses take it back."""

    key: str
    uses: int
    cuts: int

    async def answer(self, panel: Panel) -> Answer:
        node, replica = panel.node, panel.node.log.replica
        height = len(replica.cuts)
        if node.id not in (node.domain.creator, *replica.electors_at(height + 1)):
            raise Refused("only the founder and the electors invite")
        if not 0 <= self.uses <= 1 << 20 or not 0 < self.cuts <= 1 << 40:
            raise PeerError("invite: uses are 0 to 1048576, cuts 1 or more")
        payload = Invite(octets(self.key, "the invitation's key"), self.uses, height + self.cuts)
        await node.log.append(payload, timeout=10)
        return {
            "domain": node.domain.id.hex(),
            "expires": height + self.cuts,
            "addresses": list(node.network.addresses),
        }
