"""Looking at what a peer offers, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from node.domain import invitation, joining
from node.domain.invitation import Invitation
from node.errors import UserError
from node.net.blob_exchange import serve_blobs
from node.net.host import Network, open_network
from node.store.hashing import hash_bytes
from protocol.domain import parse_genesis
from protocol.identity import Identity, peer_id
from tests.node.fake_children import CONFIG, WHOLE_0, genesis, manifest_of

PEER = peer_id(Identity(bytes(32)).node)
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
GENESIS = genesis()
DOMAIN = parse_genesis(GENESIS)


def test_an_address_with_and_without_a_domain() -> None:
    assert invitation.parse(ADDRESS) == Invitation(ADDRESS, None)
    assert invitation.parse(f"{ADDRESS}?domain={'aB' * 32}") == Invitation(ADDRESS, b"\xab" * 32)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rubbish",
        "/ip4/127.0.0.1/tcp/4001",
        f"/ip4/127.0.0.1/tcp/0/p2p/{PEER}",
        f"{ADDRESS}?",
        f"{ADDRESS}?domain=",
        f"{ADDRESS}?domain={'ab' * 31}",
        f"{ADDRESS}?domain={'xy' * 32}",
        f"{ADDRESS}?domain={'ab' * 32}&more=1",
        f"{ADDRESS}?other={'ab' * 32}",
    ],
)
def test_anything_else_is_a_users_mistake(text: str) -> None:
    with pytest.raises(UserError) as caught:
        invitation.parse(text)
    assert "\n" not in str(caught.value)


@asynccontextmanager
async def peer(data: bytes, blobs: dict[bytes, bytes] | None = None) -> AsyncIterator[tuple[Network, str]]:
    """A node that serves a genesis and blobs, and its address."""
    async with open_network(Identity(bytes(32)), listen=["/ip4/127.0.0.1/tcp/0"], domain_tag="test") as network:
        joining.serve(network, data)

        async def read(digest: bytes, offset: int, length: int) -> bytes | None:
            await trio.lowlevel.checkpoint()
            blob = (blobs or {}).get(digest)
            return None if blob is None else blob[offset : offset + length]

        serve_blobs(network, read)
        yield network, network.addresses[0]


async def test_a_look_tells_domain_and_model() -> None:
    blobs = {hash_bytes(data): data for data in (CONFIG, manifest_of(WHOLE_0).encode())}
    async with peer(GENESIS, blobs) as (network, address):
        offer = await invitation.inspect(Invitation(address, DOMAIN.id), 5)
        assert (offer.domain, offer.genesis) == (DOMAIN, GENESIS)
        assert (offer.parameters, offer.size, offer.shape) == (16, 64, "")
        # The peer met a stranger, not the node that is to join.
        assert network.node not in network.peers


async def test_a_peer_without_the_models_files_can_be_joined_as_well() -> None:
    async with peer(GENESIS) as (_, address):
        offer = await invitation.inspect(Invitation(address, None), 5)
    assert (offer.domain, offer.parameters, offer.size) == (DOMAIN, None, None)


async def test_another_domain_is_refused() -> None:
    async with peer(GENESIS) as (_, address):
        with pytest.raises(UserError, match=rf"offers the domain {DOMAIN.id.hex()} \(fakes\), not {'00' * 32}"):
            await invitation.inspect(Invitation(address, bytes(32)), 5)


@pytest.mark.parametrize("data", [b"", b"rubbish", GENESIS[:-1], GENESIS[:-1] + bytes([GENESIS[-1] ^ 1])])
async def test_a_genesis_that_is_not_valid_is_refused(data: bytes) -> None:
    async with peer(data) as (_, address):
        with pytest.raises(UserError, match="serves a genesis that is not valid"):
            await invitation.inspect(Invitation(address, None), 5)


async def test_nobody_there() -> None:
    async with peer(GENESIS) as (_, address):
        pass
    with pytest.raises(UserError, match=r"no genesis: .*nobody answers there"):
        await invitation.inspect(Invitation(address, None), 5)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (b'{"num_hidden_layers": 3, "hidden_size": 64}', "3 layers of 64"),
        (b'{"num_hidden_layers": "3", "hidden_size": 64}', ""),
        (b"[" * 100_000, ""),
        (b'{"num_hidden_layers": 3, "hidden_size": 1' + b"0" * 4000 + b"}", ""),
        (b"[]", ""),
        (None, ""),
    ],
)
def test_the_models_shape(config: bytes | None, shape: str) -> None:
    assert invitation._shape(config) == shape
