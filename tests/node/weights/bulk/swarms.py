"""Several nodes with real stores, real children and real sockets, whose daemons live in this process.

Between them is a "libp2p" of function calls, that hands out tokens and serves chunks; what of it is asked is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio

from node.errors import Refused, Unreachable
from node.net.blob_exchange import CHUNK_PROTOCOL, CHUNK_REQUEST, HAVE_PROTOCOL
from node.store.version_store import VersionStore
from node.weights.bulk import bearer_tokens
from node.weights.bulk.token_exchange import Route
from node.weights.fetching import Fetching
from node.weights.held import Notice
from protocol import codec
from protocol.errors import PeerError
from protocol.weights.holders import Holding
from tests.node.weights.bulk.nodes import Some, until
from tests.protocol.builders import key


class Links:
    """What connects the daemons."""

    def __init__(self) -> None:
        self.members: dict[bytes, Member] = {}
        self.requests: Counter[str] = Counter()


class _Network:
    """What a transfer asks of ``node.net.host.Network``, for one member."""

    def __init__(self, links: Links, node: bytes) -> None:
        self._links = links
        self.node = node
        self.blamed: list[tuple[bytes, str]] = []

    @property
    def peers(self) -> list[bytes]:
        return [node for node in self._links.members if node != self.node]

    def blame(self, peer: bytes, error: PeerError) -> None:
        self.blamed.append((peer, str(error)))

    async def request(self, peer: bytes, protocol: str, payload: bytes, *, timeout: float, max_response: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self._links.requests[protocol] += 1
        member = self._links.members.get(peer)
        if member is None or member.dead:
            raise Unreachable("no answer")
        found: bytes | None = None
        if protocol == HAVE_PROTOCOL:
            found = member.store.bitmap(payload)
        elif protocol == CHUNK_PROTOCOL:
            digest, index = codec.parse(payload, CHUNK_REQUEST, max_bytes=64, what="chunk request")
            found = member.read(digest, index)
        if found is None:
            raise Refused("not held")
        return found


class Tokens:
    """What a transfer asks of ``node.weights.bulk.token_exchange.TokenExchange``."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.asked: Counter[bytes] = Counter()
        self.vain: Counter[bytes] = Counter()

    async def route(self, peer: bytes) -> Route:
        await trio.lowlevel.checkpoint()
        self.asked[peer] += 1
        other = self._member.links.members.get(peer)
        if other is None or other.dead:
            raise Unreachable("no answer")
        addresses = other.bulk.addresses if other.address is None else [other.address]
        if not addresses or other.hidden or self.vain[peer]:
            raise Refused("nothing is served at the moment")
        seconds = other.token_seconds
        token = bearer_tokens.mint(
            other.bulk.secret, self._member.id, [bearer_tokens.LOCAL], time.monotonic() + seconds
        )
        return Route(addresses[0], token, trio.current_time() + seconds * 0.7, other.foreign)

    def spoil(self, peer: bytes) -> None:
        pass

    def misled(self, peer: bytes) -> None:
        self.vain[peer] += 1


class Nothing:
    """No versions are held, and nothing can be spared."""

    def spare(self, present: Sequence[bytes]) -> list[bytes]:
        return []

    async def drop_gone(self) -> None:
        await trio.lowlevel.checkpoint()


class Member(Some):
    """One node. ``hidden``: it gives no tokens, so that libp2p is the only way to it. ``address``: said instead of its
    own."""

    def __init__(self, links: Links, folder: Path, name: str, **options: Any) -> None:
        super().__init__(folder, key(name), network=_Network(links, key(name).node), **options)
        self.links = links
        self.name = name
        self.hidden = False
        self.dead = False
        self.address: str | None = None
        self.foreign = False
        self.token_seconds = 600.0
        self.tamper: Callable[[bytes], bytes] = lambda data: data
        self.asked = Tokens(self)
        self.store = VersionStore(folder / "versions")
        means: Any = SimpleNamespace(node=self, versions=self.store, bulk=self.bulk, tokens=self.asked, notice=Notice())
        self.fetching = Fetching(means, cast("Any", Nothing()))
        links.members[self.id] = self

    def read(self, digest: bytes, index: int) -> bytes | None:
        data = self.store.read_chunk(digest, index)
        return None if data is None else self.tamper(data)

    def holders(self, digest: bytes, *, spared: Sequence[str] = ()) -> Mapping[bytes, Holding]:
        """All others that have begun the object."""
        found = {}
        for node, other in self.links.members.items():
            held = other.store.open(digest)
            if other is not self and held is not None and not other.dead:
                found[node] = Holding(whole=held.verified() == held.count, spared=other.name in spared)
        return found


@asynccontextmanager
async def members(folder: Path, *names: str, **options: Any) -> AsyncIterator[list[Member]]:
    """Nodes whose children run, in the order of ``names``."""
    links = Links()
    made = [Member(links, folder / name, name, **options) for name in names]
    async with AsyncExitStack() as stack:
        for member in made:
            stack.enter_context(member.bulk.ports.open())
        nursery = await stack.enter_async_context(trio.open_nursery())
        for member in made:
            nursery.start_soon(member.bulk.run)
        await until(lambda: all(member.bulk.up for member in made))
        yield made
        nursery.cancel_scope.cancel()
