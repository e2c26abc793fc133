"""What a running node tells of itself: the answers of the control socket's reading operations, ready for JSON.

Ids are hex, fractions floats, sizes bytes, times seconds unless the name says ``_ms``.
"""

from __future__ import annotations

from typing import Final

import trio

from node import __version__
from node.api import explain, node_rows
from node.api.control_requests import Answer, Panel, Request
from node.api.node_rows import account, role_rows, step_row
from node.context import Node
from node.weights.held import payload as weights_payload
from protocol.identity import peer_id
from protocol.records import Step

RECENT_STEPS: Final = 1000
"""Steps of which a status tells the figures, the newest."""
RECENT_EVALUATIONS: Final = 50
ROOM: Final = 200 << 20
"""Free bytes below which a status complains."""


class Status(Request, tag="status"):
    """What the node does."""

    async def answer(self, panel: Panel) -> Answer:
        node, own = panel.node, panel.own
        ledger, replica = node.log.ledger, node.log.replica
        cut = replica.newest_cut
        accounts, mine = ledger.accounts(final=True), ledger.accounts().get(node.id)
        held = panel.weights.held.newest_held()
        sent, received = node.network.traffic
        peers = node.network.peers
        inbound = sum(peer.inbound for peer in peers.values())
        answer = {
            "agent": f"farflung/{__version__}",
            "name": node.config.name,
            "node": node.id.hex(),
            "peer_id": peer_id(node.id),
            "role": own.role,
            "why": explain.why_now(panel),
            "waits_for": explain.waits_for(panel),
            "leaving": own.leaving,
            "left": own.left,
            "domain": node.domain.id.hex(),
            "domain_name": node.domain.name,
            "version": -1 if held is None else weights_payload(held).number,
            "newest_version": panel.weights.held.newest_number(),
            "step": ledger.step_count(),
            "heads_root": replica.heads_root().hex(),
            "cut_height": 0 if cut is None else cut.cut.height,
            "final": not replica.uncovered(),
            "own_entries": node.log.own_seq + 1,
            "own_final": replica.certified_head(node.id) == node.log.own_seq,
            "frozen": replica.frozen(node.id),
            "over": node.log.over(),
            "pending_audits": sum(panel.presences.can_decide(ledger.due(entry)) for entry in ledger.outstanding()),
            "generating": own.generating,
            "evaluating": panel.evaluations.under_way,
            "peers": len(peers),
            "inbound": inbound,
            "outbound": len(peers) - inbound,
            "bytes_sent": sent,
            "bytes_received": received,
            "tokens": own.tokens_generated,
            "tokens_per_second": own.tokens_per_second,
            "pause_at_step": own.pause_at_step,
            "disk_free": node.directory.free_bytes(),
            "health": _health(node),
            "addresses": list(node.network.addresses),
            "bulk": {
                "addresses": panel.bulk.addresses,
                "listening": panel.bulk.ports.addresses(),
                "private": panel.bulk.private,
            },
            "children": [{"name": name, "pid": pid} for name, pid in sorted(own.children.items())],
            "account": None if mine is None else account(mine, accounts.get(node.id)),
            "last_rejection": explain.last_rejection(ledger, node.id),
            "unpaid": explain.unpaid(mine),
            "why_nothing": explain.why_nothing(panel),
            "credit": {author.hex(): entry.credit for author, entry in accounts.items()},
            "reasons": {author.hex(): dict(entry.reasons) for author, entry in accounts.items()},
            "nodes": role_rows(ledger),
            "evaluations": list(panel.evaluations.rows)[-RECENT_EVALUATIONS:],
            "steps": [
                step_row(entry.payload) for entry in ledger.steps()[-RECENT_STEPS:] if isinstance(entry.payload, Step)
            ],
        }
        answer["problems"] = explain.problems(answer, ROOM)
        return answer


class Peers(Request, tag="peers"):
    """Who is there: connected peers, and nodes that are only heard by gossip."""

    async def answer(self, panel: Panel) -> Answer:
        node = panel.node
        connected, heard, ledger = node.network.peers, panel.presences.live(), node.log.ledger
        rows = []
        for other in sorted({*connected, *heard} - {node.id}):
            peer, presence = connected.get(other), heard.get(other)
            numbers = [ledger.version_number(version) for version in presence.versions] if presence is not None else []
            rows.append(
                {
                    "node": other.hex(),
                    "peer_id": peer_id(other),
                    "name": ledger.name(other) if presence is None else presence.name,
                    "connected": peer is not None,
                    "inbound": peer is not None and peer.inbound,
                    "address": "" if peer is None else peer.address,
                    "seconds": 0 if peer is None else round(trio.current_time() - peer.since),
                    "present": presence is not None,
                    "role": ledger.standing_role(other) if presence is None else presence.role,
                    "willing": [] if presence is None else list(presence.willing),
                    "version": max((number for number in numbers if number is not None), default=-1),
                    "addresses": [] if presence is None else list(presence.addresses),
                    "paused": presence is not None and bool(presence.paused),
                }
            )
        return {"node": node.id.hex(), "peers": rows}


class Roles(Request, tag="roles"):
    """Who holds which role, by the log and by what is heard."""

    async def answer(self, panel: Panel) -> Answer:
        node = panel.node
        heard = panel.presences.live()
        nodes = role_rows(node.log.ledger)
        for row in nodes:
            presence = heard.get(bytes.fromhex(row["node"]))
            row["present"] = presence is not None
            row["plays"] = None if presence is None else presence.role
        return {"domain": node.domain.id.hex(), "nodes": nodes}


def _health(node: Node) -> list[str]:
    trouble = None if node.log.disk_trouble is None else f"the log is not stored: {node.log.disk_trouble}"
    return sorted(filter(None, [*node.health.warnings.values(), trouble, node.log.store.unreadable]))


class Credits(Request, tag="credits"):
    """What everybody earned."""

    async def answer(self, panel: Panel) -> Answer:
        return node_rows.credits(panel.node.log.ledger)
