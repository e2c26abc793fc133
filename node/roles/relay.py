"""The relay: holds the newest versions before others do and serves them.

Fetching and serving are every node's (``node.weights``); what makes a relay is that others ask it first and leave it
a head start. So its life is to be there, and it needs no child process.
"""

from __future__ import annotations

import trio

from node.context import Node


async def run(node: Node) -> None:
    """Serve until cancelled."""
    del node
    await trio.sleep_forever()
