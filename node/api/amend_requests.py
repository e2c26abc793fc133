"""Amendments over the control socket: what is in force, the own elector's signature, and carrying one into the log.

``{"op": "amend"}`` tells the newest number, electors and thresholds in force; ``{"op": "amend_sign", "body": HEX}`` has
the node's elector sign; ``{"op": "amend_submit", "body": HEX, "votes": {NODE: HEX}}`` appends the entry.
"""

from __future__ import annotations

from typing import Any

from node.context import Node
from protocol.errors import Error, PeerError
from protocol.log.amendment import Amendment

OPS = ("amend", "amend_sign", "amend_submit")


async def answer(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one of ``OPS``."""
    replica = node.log.replica
    height = len(replica.cuts) + 1
    electors = replica.electors_at(height)
    if request["op"] == "amend":
        return {
            "domain": node.domain.id.hex(),
            "number": replica.amendments.number,
            "electors": [elector.hex() for elector in electors],
            "thresholds": replica.thresholds_at(height).to_value(),
        }
    try:
        amendment = Amendment.parse(bytes.fromhex(request.get("body", "")))
        if amendment.domain != node.domain.id:
            raise PeerError("amendment: it belongs to another domain")
        if request["op"] == "amend_sign":
            if node.elector is None or node.id not in electors:
                return {"error": "this node is no elector of the domain"}
            signature = await node.elector.voter.sign_amendment(amendment)
            if isinstance(signature, str):
                return {"error": f"the elector does not sign: {signature}"}
            return {"elector": node.id.hex(), "signature": signature.hex()}
        votes = {bytes.fromhex(elector): bytes.fromhex(vote) for elector, vote in request.get("votes", {}).items()}
        if amendment.number != replica.amendments.number + 1:
            return {"error": f"the next amendment has number {replica.amendments.number + 1}"}
        payload = amendment.payload(votes)
        amendment.verify(payload.votes, electors)
        (entry,) = await node.log.append(payload, timeout=5)
        return {"seq": entry.seq, "id": entry.id.hex()}
    except (ValueError, TypeError, AttributeError):
        return {"error": "the amendment is not hexadecimal"}
    except (Error, OSError) as error:
        return {"error": str(error)}
