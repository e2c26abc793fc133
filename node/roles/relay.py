"""The relay: holds the newest versions before others do, serves them, and offers them to those who lag.

Fetching and serving are every node's (``node.weights.following``); what makes a relay is that others ask it first and
leave it a head start, and that it offers what it has (``node.weights.offers``). It needs no child process of its own.
"""

from __future__ import annotations

from node.context import Node
from node.weights.following import WeightsService
from node.weights.offers import push


async def run(node: Node, weights: WeightsService) -> None:
    """Offer, and serve, until cancelled."""
    await push(node, weights)
