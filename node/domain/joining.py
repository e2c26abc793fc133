"""How a node comes to know its domain: the genesis it holds, or the one that a bootstrap peer serves.

1. A genesis that is held is final; a data directory belongs to one domain for good.
2. Fetched bytes are parsed, and thereby verified against their creator's signature, before they are kept.
3. Until the genesis is known nothing can run, so here an unreachable peer ends the start with one clear line.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from node.errors import UserError
from node.net.address_text import AddressError
from node.net.host import Network, open_network
from node.net.requests import Unreachable
from node.store.data_directory import DataDirectory
from protocol.constants import MAX_GENESIS_BYTES
from protocol.domain import Domain, parse_genesis
from protocol.errors import PeerError
from protocol.identity import Identity

PROTOCOL = "/farflung/genesis/1"
ANSWER_PATIENCE = 10.0
"""Seconds for an answer of a bootstrap peer."""


def held(directory: DataDirectory) -> Domain | None:
    """The domain whose genesis the directory holds."""
    data = directory.genesis()
    if data is None:
        return None
    try:
        return parse_genesis(data)
    except PeerError as error:
        raise UserError(
            f"{directory.genesis_file}: not a valid genesis ({error})",
            "delete the file to fetch it from a bootstrap peer, or restore it from a backup",
        ) from None


def required(directory: DataDirectory) -> Domain:
    """The same, for what needs one. Raises ``UserError`` where the node joined none yet."""
    domain = held(directory)
    if domain is None:
        raise UserError(f"{directory.path}: this node joined no domain yet", "farflung join ADDRESS")
    return domain


def require_same(directory: DataDirectory, wanted: bytes | None, remedy: str) -> None:
    """Raise ``UserError`` with ``remedy`` where the directory belongs to another domain than ``wanted``; None: any."""
    domain = held(directory)
    if domain is not None and wanted not in (None, domain.id):
        raise UserError(f"{directory.path}: this node belongs to the domain {domain.id.hex()} ({domain.name})", remedy)


def serve(network: Network, genesis: bytes) -> None:
    """Give the genesis to whoever asks."""

    async def answer(peer: bytes, request: bytes) -> bytes:
        del peer, request
        return genesis

    network.serve(PROTOCOL, answer, max_request=0)


async def fetch(identity: Identity, directory: DataDirectory, addresses: Sequence[str], patience: float) -> Domain:
    """Fetch, check and keep the genesis that one of ``addresses`` serves; ``UserError`` after ``patience`` seconds."""
    if not addresses:
        raise UserError(
            f"{directory.path}: the domain is not known",
            f"name a peer in {directory.config_file.name}: bootstrap = […]",
        )
    async with open_network(identity, listen=(), domain_tag="genesis") as network:
        deadline = trio.current_time() + patience
        while True:
            for address in addresses:
                try:
                    _, data, domain = await ask_genesis(network, address, ANSWER_PATIENCE)
                except (Unreachable, AddressError) as error:
                    problem = str(error)
                else:
                    directory.save_genesis(data)
                    return domain
            if trio.current_time() > deadline:
                raise UserError(f"no genesis: {problem}", "check the address and that the peer runs")
            await trio.sleep(0.5)


async def ask_genesis(network: Network, address: str, patience: float) -> tuple[bytes, bytes, Domain]:
    """The node at ``address``, the genesis that it serves and the domain; each answer may take ``patience`` seconds.

    Raises ``Unreachable``, ``AddressError``, and ``UserError`` for a genesis that is not valid.
    """
    peer = await network.connect(address, timeout=patience)
    data = await network.request(peer, PROTOCOL, b"", timeout=patience, max_response=MAX_GENESIS_BYTES)
    try:
        return peer, data, parse_genesis(data)
    except PeerError as error:
        raise UserError(f"{address} serves a genesis that is not valid ({error})", "ask for another peer") from None
