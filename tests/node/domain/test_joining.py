"""How a node comes to know its domain, over real connections."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from node.domain import joining
from node.errors import UserError
from node.net.host import open_network
from node.store.data_directory import DataDirectory
from protocol.domain import parse_genesis
from protocol.identity import peer_id
from tests.node.net.helpers import LISTEN, identity
from tests.protocol.builders import small_genesis

GENESIS = small_genesis()


def directory(tmp_path: Path) -> DataDirectory:
    made = DataDirectory(tmp_path / "node")
    made.create()
    return made


def forged() -> bytes:
    """A genesis whose last byte of the signature is wrong."""
    return GENESIS[:-1] + bytes([GENESIS[-1] ^ 1])


def test_what_is_held_is_parsed(tmp_path: Path) -> None:
    node = directory(tmp_path)
    assert joining.held(node) is None
    node.save_genesis(GENESIS)
    assert joining.held(node) == parse_genesis(GENESIS)


@pytest.mark.parametrize("data", [b"", b"nonsense", GENESIS[:-1], forged(), GENESIS + b"\0", b"\0" * 100_000])
def test_a_damaged_genesis_is_told_with_its_remedy(tmp_path: Path, data: bytes) -> None:
    node = directory(tmp_path)
    node.genesis_file.write_bytes(data)
    with pytest.raises(UserError, match=r"genesis: not a valid genesis \(.+\); delete the file") as error:
        joining.held(node)
    assert "\n" not in str(error.value)


async def test_it_is_fetched_from_the_first_peer_that_answers(tmp_path: Path) -> None:
    node = directory(tmp_path)
    nobody = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{peer_id(identity(9).node)}"
    async with open_network(identity(1), listen=LISTEN, domain_tag="test") as network:
        joining.serve(network, GENESIS)
        with trio.fail_after(20):
            domain = await joining.fetch(identity(2), node, [nobody, network.addresses[0]], patience=10)
    assert domain == parse_genesis(GENESIS)
    assert node.genesis() == GENESIS
    assert joining.held(node) == domain


async def test_a_peer_that_is_slow_to_start_is_waited_for(tmp_path: Path) -> None:
    node = directory(tmp_path)
    port = free_port()
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id(identity(1).node)}"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(joining.fetch, identity(2), node, [address], 20.0)
        await trio.sleep(0.3)
        async with open_network(identity(1), listen=[f"/ip4/127.0.0.1/tcp/{port}"], domain_tag="test") as network:
            joining.serve(network, GENESIS)
            with trio.fail_after(20):
                while node.genesis() is None:  # noqa: ASYNC110  a file that appears
                    await trio.sleep(0.05)


async def test_a_forged_genesis_is_not_kept(tmp_path: Path) -> None:
    node = directory(tmp_path)
    async with open_network(identity(1), listen=LISTEN, domain_tag="test") as network:
        joining.serve(network, forged())
        with trio.fail_after(20), pytest.raises(UserError, match=r"serves a genesis that is not valid \(.*signature"):
            await joining.fetch(identity(2), node, [network.addresses[0]], patience=10)
    assert node.genesis() is None


async def test_nobody_answers(tmp_path: Path) -> None:
    node = directory(tmp_path)
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{peer_id(identity(1).node)}"
    with trio.fail_after(20), pytest.raises(UserError) as error:
        await joining.fetch(identity(2), node, [address], patience=0.2)
    assert address in str(error.value)
    assert "check the address and that the peer runs" in str(error.value)


async def test_another_node_answers(tmp_path: Path) -> None:
    node = directory(tmp_path)
    async with open_network(identity(1), listen=LISTEN, domain_tag="test") as network:
        joining.serve(network, GENESIS)
        wrong = network.addresses[0].rpartition("/")[0] + "/" + peer_id(identity(3).node)
        with trio.fail_after(20), pytest.raises(UserError, match="another node answers there"):
            await joining.fetch(identity(2), node, [wrong], patience=0.2)
    assert node.genesis() is None


async def test_without_an_address_there_is_nothing_to_ask(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the domain is not known; name a peer in farflung\.toml: bootstrap"):
        await joining.fetch(identity(2), directory(tmp_path), [], patience=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
