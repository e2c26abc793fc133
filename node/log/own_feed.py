"""A node's own feed: opened by its join, waited for after a restart, and what keeps a newcomer from the log's past."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import trio

from node import __version__
from node.context import Node
from protocol.log.recovery import commitment
from protocol.records import Join

PAUSE: Final = 10.0
"""Seconds between two looks."""


async def keep_joined(node: Node) -> None:
    """A newcomer opens its feed; a node that was here before waits until peers told it its own head; one whose feed was
    ended for good says so."""
    while True:
        over = node.log.over()
        if over is not None:
            node.health.clear("own head")
            node.health.warn("feed", over)
            await trio.sleep(PAUSE)
            continue
        with trio.move_on_after(PAUSE):
            await node.log.ready.wait()
        if not node.log.ready.is_set():
            node.health.warn("own head", f"nothing is appended: {node.log.waits_for()}")
            continue
        node.health.clear("own head")
        if node.log.own_seq < 0 and not node.log.replica.admissions.by(node.id, len(node.log.replica.cuts)):
            await node.log.wait_change(node.log.generation, PAUSE)
            continue
        if node.log.own_seq < 0:
            recovery = commitment(node.directory.recovery_public())
            await node.log.append(Join(recovery, f"farflung/{__version__}", node.config.name))
            if node.directory.recovery_file.exists():
                node.logger.info("the recovery key is to be written down: farflung identity recovery show")
        # The head may come into doubt again: another machine may have the key.
        await trio.sleep(PAUSE)


async def watch_history(node: Node, unserved: Collection[bytes]) -> None:
    """Tell the owner of a newcomer whose peers have all dropped what it needs: those that ``LogSync`` has in
    ``unserved`` at the time."""
    while True:
        if unserved:
            node.health.warn("history", "no peer has the log's old entries any more: connect to one that keeps them")
        else:
            node.health.clear("history")
        await trio.sleep(PAUSE)
