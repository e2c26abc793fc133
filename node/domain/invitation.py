"""Looking at what a peer invites to, before anything of it is kept.

1. An invitation is a peer's address, with ``?domain=<id>`` behind it where the domain must be a certain one, and with
   ``invite=<seed>`` where an invitation key lets its holder in (``protocol.log.admission``).
2. A peer is asked with a key of its own, so that a peer learns nothing of the node and a running one is not disturbed.
3. What a peer says is checked: the genesis by its creator's signature, the model's files by the hashes in it.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from dataclasses import dataclass
from typing import Final

import trio

from node.domain.joining import ask_genesis
from node.errors import UserError
from node.net.address_text import AddressError, address_problem
from node.net.blob_exchange import fetch_blob
from node.net.host import Network, open_network
from node.net.requests import Unreachable
from protocol.constants import MAX_MANIFEST_BYTES
from protocol.domain import Domain
from protocol.errors import PeerError
from protocol.identity import Identity
from protocol.records import Blob
from protocol.weights.manifest import Manifest

MAX_CONFIG_BYTES: Final = 1 << 20
"""A model's configuration that is larger is not looked at."""

MAX_SHAPE: Final = 10**6
"""A model with as many layers, or as wide, is not believed: the digits could fill the screen of whoever is asked."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """A peer's multiaddr, and the id of the domain (32 bytes) that it must be of and the seed of the invitation key
    (32 bytes), where those were given."""

    address: str
    domain: bytes | None = None
    seed: bytes | None = None


@dataclass(frozen=True, slots=True)
class DomainOffer:
    """What a peer invites to. ``parameters`` and ``size`` (bytes) of the model are None and ``shape``, what its
    configuration says of its layers, is empty where the peer did not tell."""

    domain: Domain
    genesis: bytes
    parameters: int | None
    size: int | None
    shape: str


def parse(text: str) -> Invitation:
    """Parse ``/ip4/…/tcp/…/p2p/…``, with ``?domain=<64 hex digits>``, ``invite=<64 hex digits>`` or both joined by
    ``&`` behind it. Raises ``UserError``."""
    address, mark, query = text.partition("?")
    if (problem := address_problem(address, peer=True)) is not None:
        raise UserError(problem, "expected an address such as /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…")
    if not mark:
        return Invitation(address)
    found: dict[str, bytes] = {}
    for part in query.split("&"):
        match = re.fullmatch(r"(domain|invite)=([0-9a-fA-F]{64})", part)
        if match is None or match[1] in found:
            raise UserError(
                f"the address ends in {mark + query!r}",
                "expected ?domain= and the 64 hex digits of its id, then perhaps &invite= and 64 more",
            )
        found[match[1]] = bytes.fromhex(match[2])
    return Invitation(address, found.get("domain"), found.get("invite"))


async def inspect(invitation: Invitation, patience: float) -> DomainOffer:
    """Ask the peer what it invites to; each of its answers may take ``patience`` seconds. Raises ``UserError``.

    A peer of another domain than the invitation names is refused.
    """
    address = invitation.address
    async with open_network(Identity(secrets.token_bytes(32)), listen=(), domain_tag="genesis") as network:
        try:
            peer, data, domain = await ask_genesis(network, address, patience)
        except (Unreachable, AddressError) as error:
            raise UserError(f"no genesis: {error}", "check the address and that the peer runs") from None
        if invitation.domain is not None and invitation.domain != domain.id:
            raise UserError(
                f"{address} offers the domain {domain.id.hex()} ({domain.name}), not {invitation.domain.hex()}",
                "nothing was kept; ask whoever gave you the address",
            )
        manifest = await _blob(network, peer, domain.model.manifest, MAX_MANIFEST_BYTES, patience)
        config = await _blob(network, peer, domain.model.config, MAX_CONFIG_BYTES, patience)
    parameters, size = _measure(manifest)
    return DomainOffer(domain, data, parameters, size, _shape(config))


async def _blob(network: Network, peer: bytes, blob: Blob, most: int, patience: float) -> bytes | None:
    if blob.size > most:
        return None
    try:
        return await fetch_blob(network, [peer], blob.hash, blob.size, timeout=patience)
    except (Unreachable, PeerError, trio.TooSlowError):
        return None


def _measure(manifest: bytes | None) -> tuple[int | None, int | None]:
    """Parameters and bytes of the model."""
    try:
        parsed = None if manifest is None else Manifest.parse(manifest)
    except PeerError:
        parsed = None
    if parsed is None:
        return None, None
    return sum(math.prod(tensor.shape) for tensor in parsed.tensors), parsed.size


def _shape(config: bytes | None) -> str:
    try:
        values = json.loads(config or b"{}")
        layers, width = values["num_hidden_layers"], values["hidden_size"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    plausible = all(type(value) is int and 0 < value < MAX_SHAPE for value in (layers, width))
    return f"{layers} layers of {width}" if plausible else ""
