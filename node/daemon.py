"""The wiring of one node: which services run, and in which order they start and stop.

Start: lock, key, network, genesis, log, own head confirmed, join, presence, role. Each later step needs the earlier ones.
Stop: everything is cancelled at once; what was acknowledged is on disk already, and stopping appends nothing.
The daemon imports neither torch nor any task library: children do (``node.workers``, ``node.tasks``).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256

import trio
import trio_asyncio

import node as package
from node import cheats, joining
from node.api import server
from node.config import Config
from node.context import Health, Node
from node.errors import UserError
from node.log.elector import Elector
from node.log.gossip import LogGossip
from node.log.service import LogService
from node.net.host import Network, open_network
from node.net.transfer import serve_blobs, serve_chunks
from node.presences import Presences
from node.roles.manager import RoleManager
from node.step_blobs import StepBlobs
from node.store.blobs import BlobStore
from node.store.directory import DataDirectory
from node.store.log_store import LogStore
from node.store.versions import VersionStore
from node.terms import TermWatch
from node.weights import Weights
from protocol.domain import Domain
from protocol.identity import Identity
from protocol.records import Join

GENESIS_PATIENCE = 30.0
"""Seconds that a first start waits for a bootstrap peer to answer."""
ROOM = 200 << 20
"""Free bytes without which a node does not start: a log that cannot be written would stop it at once."""


def run(directory: DataDirectory) -> None:
    """Run the daemon of a data directory until it is told to stop. Raises ``UserError`` for what its user must mend."""
    with directory.open_locked():
        directory.require_room(ROOM)
        config = directory.config()
        directory.clean_work()
        logging.basicConfig(
            level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
        )
        for chatty in ("libp2p", "multiaddr", "trio_asyncio", "asyncio"):
            logging.getLogger(chatty).setLevel(logging.ERROR)
        trio_asyncio.run(main, directory, config)


async def main(directory: DataDirectory, config: Config) -> None:
    """The daemon's life inside trio."""
    identity = directory.identity()
    domain = joining.held(directory)
    if domain is not None:
        _refuse_unfit(config, domain)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_on_signal, nursery.cancel_scope)
        async with open_network(identity, listen=config.listen, domain_tag="farflung") as network:
            joining.serve(network, directory)
            if domain is None:
                domain = await joining.fetch(network, directory, config.bootstrap, GENESIS_PATIENCE)
                _refuse_unfit(config, domain)
            await _serve(directory, config, identity, domain, network, nursery.cancel_scope)


async def _serve(
    directory: DataDirectory,
    config: Config,
    identity: Identity,
    domain: Domain,
    network: Network,
    scope: trio.CancelScope,
) -> None:
    logger = logging.getLogger("farflung")
    boot = directory.next_boot()
    for address in config.bootstrap:
        network.add_peer(address)
    for addresses in directory.known_peers().values():
        for address in addresses:
            network.add_peer(address)
    async with _open_log(directory, domain, identity, network) as log:
        node = Node(
            identity=identity,
            domain=domain,
            config=config,
            directory=directory,
            network=network,
            log=log,
            blobs=BlobStore(directory.blobs),
            versions=VersionStore(directory.versions),
            health=Health(logger),
            logger=logger,
            stopping=scope.cancel,
            pause_at_step=config.devnet.pause_at_step,
        )
        node.weights, node.step_blobs, node.presences = Weights(node), StepBlobs(node), Presences(node, boot)
        serve_blobs(network, node.blobs.get)
        serve_chunks(network, node.versions.read_chunk)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, node)
            nursery.start_soon(LogGossip(network, log).run)
            nursery.start_soon(_confirm_and_join, node)
            nursery.start_soon(node.presences.run)
            nursery.start_soon(node.weights.run)
            nursery.start_soon(RoleManager(node).run)
            nursery.start_soon(_remember_peers, node)
            if identity.node in domain.electors:
                elector = Elector(log, domain, identity)
                nursery.start_soon(elector.run)
                nursery.start_soon(TermWatch(node, elector).run)
            logger.info("serving as %s at %s", config.name, ", ".join(network.addresses))


@asynccontextmanager
async def _open_log(
    directory: DataDirectory, domain: Domain, identity: Identity, network: Network
) -> AsyncIterator[LogService]:
    async with LogStore.open(directory.log_database, domain) as store, LogService.open(store, identity, network) as log:
        yield log


async def _confirm_and_join(node: Node) -> None:
    """Append nothing before peers told this node its own head; a newcomer then opens its feed."""
    await node.log.confirm_own_head()
    if node.log.replica.heads.get(node.id) is None:
        # Until `identity` makes recovery keys, the commitment is to a key that nobody has.
        recovery = sha256(b"farflung/no-recovery/v1\0" + node.id).digest()
        await node.log.append(Join(recovery, f"farflung/{package.__version__}", node.config.name))


async def _remember_peers(node: Node) -> None:
    """So that the bootstrap address is not needed again."""
    saved: dict[str, Sequence[str]] = {}
    while True:
        await trio.sleep(5)
        known = node.network.known_addresses()
        if known != saved:
            try:
                await trio.to_thread.run_sync(node.directory.save_peers, known)
                saved = dict(known)
            except OSError as error:
                node.health.warn("disk", f"{node.directory.peers_file}: {error.strerror}")


def _refuse_unfit(config: Config, domain: Domain) -> None:
    if config.devnet.cheat and not domain.devnet:
        raise UserError(
            f"cheat = {config.devnet.cheat!r} is for a devnet only", f"delete the line ({', '.join(cheats.CHEATS)})"
        )
    if len(domain.electors) > 1:
        raise UserError(
            f"the domain names {len(domain.electors)} electors, this version supports one", "install a newer Farflung"
        )


async def _stop_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()
            return
