"""What a genesis names is fetched by every member at joining, so that a founder may vanish before the first version.

Each is asked of everybody who is connected, again and again with a pause, until all are here.
"""

from __future__ import annotations

from typing import Final

import trio

from node.context import Node
from node.net.blob_exchange import BlobExchange
from node.net.requests import Unreachable
from protocol.errors import PeerError
from protocol.records import Blob

PAUSE: Final = 5.0
LONGEST: Final = 300.0


async def keep_founding_files(node: Node, blobs: BlobExchange) -> None:
    """Fetch what is not here yet; a warning says what nobody gives."""
    missing, pause = list(node.domain.blobs), PAUSE
    while missing:
        left: list[Blob] = []
        for blob in missing:
            try:
                await blobs.path(blob.hash, blob.size)
            except (Unreachable, PeerError, OSError) as error:
                left.append(blob)
                why = error
        missing = left
        if missing:
            if pause > PAUSE:
                node.health.warn("founding files", f"{len(missing)} files that the domain names are not here: {why}")
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST)
    node.health.clear("founding files")
    await trio.sleep_forever()
