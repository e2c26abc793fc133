"""A new version rests on two machines before anybody hears of it.

1. Before the trainer signs a version, another node, a relay first, fetches it whole. A trainer that is lost right after
   it published would otherwise leave the lineage on bytes that nobody has.
2. A node takes what the trainer in office entrusts to it, of the size that the model has, one version at a time. The
   newest that was entrusted is kept until another one is.
3. Members are asked, of different roles by turns, in an order that the version draws. One is asked; where it refuses,
   or is silent for a while, another one as well. Where nobody takes it within ``TOTAL`` of the time that a step took
   lately the version is published all the same, with a warning: it is better than none.
4. With a version comes its delta, where it has one. The other node takes the version by it where that is quicker, and
   holds the delta too: others will ask for it.

Wire (canonical codec), on ``/farflung/entrust/1``: ``[manifest hash, manifest size, hash of the delta's manifest or
nil, its size or 0]``; the answer is empty once the version is whole, verified and durable there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import Final

import trio

from node.context import Node
from node.net.blob_exchange import BlobExchange
from node.net.requests import Refused, Unreachable
from node.peers.presences import Presences
from node.weights.following import WeightsService
from node.weights.held import payload
from protocol import codec
from protocol.constants import MAX_MANIFEST_BYTES
from protocol.errors import PeerError
from protocol.records import Blob
from protocol.weights.delta import DeltaManifest, largest_manifest
from protocol.weights.manifest import Manifest

PROTOCOL: Final = "/farflung/entrust/1"
MAX_REQUEST: Final = 96
REQUEST: Final = codec.Array(
    (
        ("manifest", codec.HASH),
        ("size", codec.Int(1, MAX_MANIFEST_BYTES)),
        ("delta", codec.Optional(codec.HASH)),
        ("delta_size", codec.Int(0, MAX_MANIFEST_BYTES)),
    )
)

PATIENCE: Final = 5.0
SLOWEST: Final = 4 << 20
"""A node has ``PATIENCE`` seconds, and one for every so many bytes."""

CANDIDATES: Final = 3
"""So many nodes are asked at most."""

HEAD_START: Final = 0.125
"""The share of its time after which a node that has not answered gets company: one that is silent holds up nobody."""

TOTAL: Final = 0.8
"""The share of a step's time that a publication waits for it at most."""

ORDER: Final = ("relay", "validator", "inference", "none")


def serve(node: Node, weights: WeightsService, blobs: BlobExchange) -> None:
    """Take what the trainer entrusts to this node."""
    busy = trio.CapacityLimiter(1)

    async def handler(peer: bytes, request: bytes) -> bytes:
        fields = codec.parse(request, REQUEST, max_bytes=MAX_REQUEST, what="entrusted version")
        digest, size, delta, delta_size = fields
        grant, newest = node.log.ledger.grant(), node.log.ledger.newest_weights()
        if grant is None or grant.trainer != peer or newest is None:
            raise Refused("only the trainer in office entrusts versions")
        whole = payload(newest).size
        if size > 2 * node.domain.model.manifest.size or delta_size > largest_manifest(whole):
            raise PeerError("an entrusted version with manifests of an absurd size")
        try:
            busy.acquire_nowait()
        except trio.WouldBlock:
            raise Refused("another version is on its way") from None
        try:
            with trio.move_on_after(_patience(whole)) as patience:
                data = await blobs.fetch(digest, size, [peer], timeout=5)
                manifest = await trio.to_thread.run_sync(Manifest.parse, data)
                if manifest.size != whole:
                    raise PeerError("an entrusted version of another size")
                listing = None
                if delta is not None:
                    data = await blobs.fetch(delta, delta_size, [peer], timeout=5)
                    listing = await trio.to_thread.run_sync(DeltaManifest.parse, data)
                    if listing.target != digest:
                        raise PeerError("an entrusted version with the delta of another")
                await weights.keep_unpublished(manifest, listing, peer)
            if patience.cancelled_caught:
                raise Refused("it took too long")
        except Unreachable as error:
            raise Refused(str(error)) from None
        except OSError as error:
            raise Refused(f"the disk refuses it ({error.strerror})") from None
        finally:
            busy.release()
        return b""

    node.network.serve(PROTOCOL, handler, max_request=MAX_REQUEST)


def drawn(standing: Mapping[bytes, str], version: bytes) -> list[bytes]:
    """The members to ask, the first one first: one of each role by turns, those of a role in an order that the version
    draws, so that nobody knows long before which of them it will be."""
    lots = {role: [node for node, held in standing.items() if held == role] for role in ORDER}
    for nodes in lots.values():
        nodes.sort(key=lambda node: sha256(version + node).digest())
    return [node for turn in zip_longest(*lots.values()) for node in turn if node is not None]


async def give(node: Node, presences: Presences, manifest: Blob, delta: Blob | None, size: int, within: float) -> None:
    """Return once another node holds this version of ``size`` bytes, nobody near takes it, or ``within`` seconds
    passed."""
    connected = set(node.network.peers)
    others = [n for n in drawn(presences.standing(), manifest.hash) if n in connected and n != node.id]
    change = [None, 0] if delta is None else delta.to_value()
    request = codec.encode([*manifest.to_value(), *change])
    patience, reasons, taken = min(_patience(size), within), ["nobody is connected"], False
    with trio.move_on_after(within):
        taken = await _ask_in_turn(node, others[:CANDIDATES], request, patience, reasons)
    if taken:
        node.health.clear("entrusting")
    else:
        node.health.warn("entrusting", f"no other node holds the newest version yet: {reasons[-1]}")
    await trio.lowlevel.checkpoint()


async def _ask_in_turn(
    node: Node, others: Sequence[bytes], request: bytes, patience: float, reasons: list[str]
) -> bool:
    """Whether one of ``others`` took the version; ``reasons`` receives why one did not."""
    taken = False
    async with trio.open_nursery() as nursery:

        async def ask(other: bytes, over: trio.Event) -> None:
            nonlocal taken
            try:
                await node.network.request(other, PROTOCOL, request, timeout=patience + 1, max_response=0)
            except (Unreachable, PeerError) as error:
                reasons.append(str(error))
                over.set()
            else:
                taken = True
                nursery.cancel_scope.cancel()

        for other in others:
            over = trio.Event()
            nursery.start_soon(ask, other, over)
            with trio.move_on_after(patience * HEAD_START):
                await over.wait()
    return taken


def _patience(size: int) -> float:
    return PATIENCE + size / SLOWEST
