"""The control socket: how ``farflung`` commands and the devnet talk to a running daemon.

A Unix socket in the data directory, for its owner only. One JSON object a line in, one a line out:
``{"op": "status"}``, ``{"op": "pause_at", "step": N}`` (0: go on), ``{"op": "stop"}``. An answer with ``error`` says in
one line what was wrong with the request.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, Final

import trio

from node.context import Node
from node.weights import payload as weights_payload
from protocol import credit
from protocol.records import Step

MAX_LINE = 64 << 10
RECENT_STEPS = 1000
"""Steps of which a status tells the figures, the newest."""
STOPPING: Final = {"stopping": True}


async def run(node: Node, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    """Serve until cancelled."""
    with suppress(FileNotFoundError):
        node.directory.control_socket.unlink()
    listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    with node.directory.socket_address() as address:
        await listener.bind(address)
    os.chmod(node.directory.control_socket, 0o600)
    listener.listen(16)

    async def handle(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await _converse(node, stream)

    task_status.started()
    await trio.serve_listeners(handle, [trio.SocketListener(listener)])


async def _converse(node: Node, stream: trio.SocketStream) -> None:
    buffer = b""
    async with stream:
        async for part in stream:
            buffer += part
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                answer = _answer(node, line)
                await stream.send_all(json.dumps(answer).encode() + b"\n")
                if answer == STOPPING:  # only now: it ends this conversation too
                    node.stop()
            if len(buffer) > MAX_LINE:
                return


def _answer(node: Node, line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        match request:
            case {"op": "status"}:
                return status(node)
            case {"op": "pause_at", "step": int(step)} if step >= 0 and not isinstance(step, bool):
                node.pause_at_step = step
                return {"pause_at_step": step}
            case {"op": "stop"}:
                return STOPPING
    except (ValueError, RecursionError):
        return {"error": "the request is not JSON"}
    return {"error": "unknown request"}


def status(node: Node) -> dict[str, Any]:
    """What the node does, as JSON-ready values."""
    ledger, replica = node.log.ledger, node.log.replica
    cut = replica.newest_cut
    accounts = credit.credits(ledger)
    held = node.weights.newest_held()
    sent, received = node.network.traffic
    steps = ledger.steps()
    return {
        "name": node.config.name,
        "node": node.id.hex(),
        "role": node.role,
        "domain": node.domain.id.hex(),
        "version": -1 if held is None else weights_payload(held).number,
        "newest_version": node.weights.newest_number(),
        "step": len(steps),
        "heads_root": replica.heads_root().hex(),
        "cut_height": 0 if cut is None else cut.cut.height,
        "final": not replica.uncovered(),
        "pending_audits": sum(map(node.will_be_judged, ledger.outstanding())),
        "generating": node.generating,
        "peers": len(node.network.peers),
        "bytes_sent": sent,
        "bytes_received": received,
        "tokens": node.tokens_generated,
        "tokens_per_second": node.tokens_per_second,
        "pause_at_step": node.pause_at_step,
        "health": _health(node),
        "addresses": list(node.network.addresses),
        "children": [{"name": name, "pid": pid} for name, pid in sorted(node.children.items())],
        "credit": {author.hex(): account.credit for author, account in accounts.items()},
        "reasons": {author.hex(): dict(account.reasons) for author, account in accounts.items()},
        "nodes": [
            {"node": author.hex(), "name": ledger.name(author), "role": ledger.standing_role(author)}
            for author in ledger.authors()
        ],
        "steps": [_step(s.payload) for s in steps[-RECENT_STEPS:] if isinstance(s.payload, Step)],
    }


def _health(node: Node) -> list[str]:
    trouble = node.log.disk_trouble
    return sorted([*node.health.warnings.values(), *([] if trouble is None else [f"the log is not stored: {trouble}"])])


def _step(step: Step) -> dict[str, Any]:
    return {
        "step": step.number,
        "reward": step.reward / 1e6,
        "lag_mean": step.lag_mean / 1e6,
        "lag_max": step.lag_max,
        "accepted": step.accepted,
        "rejected": step.rejected,
        "trained": step.trained,
        "tokens": step.tokens,
        "train_ms": step.train_ms,
        "wait_ms": step.wait_ms,
        "publish_ms": step.publish_ms,
    }
