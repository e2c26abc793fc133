"""The addresses of known peers on disk, so that the bootstrap address is not needed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from node.context import Node
from protocol.identity import peer_id

EVERY: Final = 5.0
"""Seconds between two writes at least."""


async def remember(node: Node) -> None:
    """Write them whenever they have changed, for ever."""
    saved: dict[str, Sequence[str]] = {}
    while True:
        await trio.sleep(EVERY)
        known = {peer_id(peer): addresses for peer, addresses in node.network.known_addresses().items()}
        if known != saved:
            try:
                await trio.to_thread.run_sync(node.directory.save_peers, known)
                saved = dict(known)
                node.health.clear("peers file")
            except OSError as error:
                node.health.warn("peers file", f"{node.directory.peers_file}: {error.strerror}")
