"""The wiring of one node: which services run, and in which order they start and stop.

Start: lock, key, genesis, log, network, own head confirmed, join, presence, role; each step needs the earlier ones.
Stop: everything is cancelled at once; what was acknowledged is on disk already, and stopping appends nothing. The
process ends within ``STOP_SECONDS`` of the signal, or of its owner's wish, in the midst of anything.
The daemon imports neither torch nor any task library: children do (``node.workers``, ``node.tasks``).

Once it serves, nothing but a signal or its owner's wish ends it: a part that fails is begun again, with a warning.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import trio

import node as package
from node.api import control_socket
from node.api.weight_requests import Pulls
from node.config import Config
from node.context import Health, Node, innermost
from node.domain import joining
from node.errors import UserError
from node.log.elector import open_elector
from node.log.log_opening import load
from node.log.replicated_log import LogService
from node.log.replication import LogSync
from node.log.signature_checkers import open_checkers
from node.net.blob_exchange import serve_blobs, serve_chunks, serve_haves
from node.net.discovery import AddressError
from node.net.host import Network, PortBusy, open_network
from node.peers import twins
from node.peers.presences import Presences
from node.roles import cheats
from node.roles.engine_client import chosen
from node.roles.role_manager import RoleManager
from node.roles.rollout_pool import Pool
from node.roles.term_watch import TermWatch
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from node.store.log_store import open_log_store
from node.store.version_store import VersionStore
from node.systemd import service_manager, watchdog
from node.telemetry import metrics, tracking
from node.weights import offers, second_holder
from node.weights.bulk.bulk_process import Bulk
from node.weights.bulk.token_exchange import Routes
from node.weights.following import Weights
from node.workers import vllm_start
from protocol.domain import Domain
from protocol.errors import Error
from protocol.identity import Identity, node_id, peer_id
from protocol.log.recovery import commitment
from protocol.records import Join

GENESIS_PATIENCE = 30.0
"""Seconds that a first start waits for a bootstrap peer to answer."""
PEER_PATIENCE = 5.0
"""Seconds that a restarted node waits for a peer that may tell whether it runs elsewhere."""
TWIN_LOOKS = (1.5, 4.0, 8.0)
"""Presence intervals after which a node asks whether its twin appeared meanwhile."""
PAUSE = 5.0
"""Seconds until a part of the daemon that failed begins again."""
STOP_SECONDS: Final = 1.2
"""From the wish to stop to the end of the process. A thread that hashes or syncs a version cannot be broken off, nor
can SQLite, and libp2p and children that are killed have seconds each; none of them need end its work: files and log are
sound at any moment, as for a power cut, and the children end with the daemon."""
NO_MANAGER = service_manager.Manager()
ROOM = 200 << 20
"""Free bytes without which a node does not start: a log that cannot be written would stop it at once."""


def run(directory: DataDirectory, config: Config | None = None) -> None:
    """Run the daemon of a data directory until it is told to stop. Raises ``UserError`` for what its user must mend.

    Without ``config`` the directory's own file is it.
    """
    with directory.open_locked():
        directory.require_room(ROOM)
        config = directory.config() if config is None else config
        directory.clean_work()
        logging.basicConfig(level=config.log_level.upper(), handlers=[service_manager.log_handler()], force=True)
        # libp2p logs every stream that a peer closed as an error, with a report of many lines.
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)
        manager = service_manager.Manager.take()
        if manager.address is not None:
            # The watchdog ends a daemon that stands still with SIGABRT: the journal then has every thread's stack.
            faulthandler.enable()
        _run(directory, config, manager)


def _run(directory: DataDirectory, config: Config, manager: service_manager.Manager) -> None:
    try:
        trio.run(main, directory, config, manager, ending())
    except* (UserError, PortBusy, AddressError) as group:
        raise UserError(str(innermost(group))) from None


async def main(
    directory: DataDirectory,
    config: Config,
    manager: service_manager.Manager = NO_MANAGER,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """The daemon's life inside trio. ``manager`` is told when it serves, how it is, and when it stops; ``on_stop`` is
    called when it is to stop, also within a signal's handler."""
    fresh = not directory.exists()
    identity = directory.identity()
    async with trio.open_nursery() as nursery:

        def stop() -> None:
            on_stop()
            manager.stopping()
            nursery.cancel_scope.cancel()

        nursery.start_soon(_stop_on_signal, stop, on_stop)
        domain = joining.held(directory)
        if domain is None:
            manager.status("asks for the domain's genesis")
            domain = await joining.fetch(identity, directory, config.bootstrap, GENESIS_PATIENCE)
        _refuse_unfit(config, domain)
        known = {node_id(peer): addresses for peer, addresses in directory.known_peers().items()}
        for address in config.bootstrap:
            known.setdefault(node_id(address.rpartition("/")[2]), (address,))
        manager.status("reads the log")
        async with (
            open_log_store(directory.log_database, domain) as store,
            open_checkers() as checkers,
            open_network(identity, listen=config.listen, domain_tag=domain.id.hex()[:16]) as network,
        ):
            archive = config.history == "all"
            ledger = await load(store, domain)
            log = LogService(
                identity, ledger, store, known=known, fresh=fresh, archive=archive, checking=checkers.check
            )
            await log.checkpoints.load()
            for addresses in known.values():
                for address in addresses:
                    await network.add_peer(address)
            node = _node(directory, config, identity, domain, network, log, stop)
            await _serve(node, manager)


def _node(
    directory: DataDirectory,
    config: Config,
    identity: Identity,
    domain: Domain,
    network: Network,
    log: LogService,
    stop: Callable[[], None],
) -> Node:
    logger = logging.getLogger("farflung")
    node = Node(
        identity=identity,
        domain=domain,
        config=config,
        directory=directory,
        network=network,
        log=log,
        blobs=BlobStore(directory.blobs),
        versions=VersionStore(
            directory.versions, quota=config.weights.quota << 20, reserve=config.weights.reserve << 20
        ),
        health=Health(logger),
        logger=logger,
        stop=stop,
        pause_at_step=config.devnet.pause_at_step,
    )
    node.bulk = Bulk(node)
    node.routes = Routes(node, node.bulk)
    node.weights, node.pool = Weights(node), Pool(node)
    node.pulls = Pulls(node)
    node.presences = Presences(node, directory.next_boot())
    return node


async def _serve(node: Node, manager: service_manager.Manager) -> None:
    network, log, domain = node.network, node.log, node.domain
    sync = LogSync(log, network, interval=domain.timings.presence_ms / 1000)
    network.on_connect(sync.connected)
    joining.serve(network, node.directory.genesis() or b"")
    serve_blobs(network, node.blobs.get_async, may_read=node.routes.may_read)
    read = partial(partial, trio.to_thread.run_sync)
    serve_chunks(network, read(node.versions.read_chunk), may_have=node.routes.may_have)
    serve_haves(network, read(node.versions.bitmap), may_have=node.routes.may_have)
    node.routes.serve()
    offers.serve(node)
    second_holder.serve(node)
    twins.serve(network, node.presences)
    node.presences.listen()
    with node.bulk.open():
        await _run_parts(node, manager, sync)


async def _run_parts(node: Node, manager: service_manager.Manager, sync: LogSync) -> None:
    network, log = node.network, node.log
    async with trio.open_nursery() as nursery:
        await nursery.start(control_socket.run, node)
        await nursery.start(sync.run)
        metrics_file = node.directory.path / metrics.NAME
        nursery.start_soon(_keep, node, "metrics", partial(node.metrics.run, metrics_file, node.health))
        nursery.start_soon(_keep, node, "tracking", partial(tracking.run, node))
        nursery.start_soon(_keep, node, "own feed", partial(_keep_joined, node))
        nursery.start_soon(_keep, node, "log", partial(_watch_history, node, sync))
        nursery.start_soon(_keep, node, "weights", node.weights.run)
        nursery.start_soon(_keep, node, "pulls", node.pulls.run)
        roles = RoleManager(node)
        nursery.start_soon(_take_part, node, roles)
        nursery.start_soon(_keep, node, "peers", partial(_remember_peers, node))
        if _elects(node):
            node.elector = await open_elector(log, node.identity, sync)
        nursery.start_soon(_keep, node, "elector", partial(_elect, node, sync))
        node.logger.info("%s serves at %s", node.config.name, ", ".join(network.addresses))
        manager.ready(watchdog.status_line(node))
        nursery.start_soon(_keep, node, "bulk", node.bulk.run)  # only now: a child's start takes a core for a moment
        if manager.address is not None:
            nursery.start_soon(_keep, node, "watchdog", partial(watchdog.run, node, roles, manager))


async def _keep(node: Node, name: str, part: Callable[[], Awaitable[None]]) -> None:
    """Run one part of the daemon for ever. What it could not deal with itself ends neither it nor the other parts."""
    while True:
        try:
            await part()
        except* Exception as group:
            error = innermost(group)
            expected = isinstance(error, Error | OSError | trio.TooSlowError)
            node.health.warn(name, f"{name}: {error or type(error).__name__}; it goes on in {PAUSE:.0f} s")
            if not expected:
                node.logger.error("%s: a bug", name, exc_info=error)
        await trio.sleep(PAUSE)
        node.health.clear(name)


async def _take_part(node: Node, roles: RoleManager) -> None:
    """Publish presences and take a role, unless this very node turns out to run elsewhere (a copied data directory)."""
    await _refuse_copy(node)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_keep, node, "presence", node.presences.run)
        nursery.start_soon(_keep, node, "roles", roles.run)
        nursery.start_soon(_refuse_twin, node)


async def _refuse_copy(node: Node) -> None:
    # On its first start a node has a key that nobody else can have.
    if node.presences.boot > 1 and node.network.known_addresses():
        connected = trio.Event()
        node.network.on_connect(lambda _: connected.set())
        if not node.network.peers:
            with trio.move_on_after(PEER_PATIENCE):
                await connected.wait()
        await _refuse_elsewhere(node)


async def _refuse_twin(node: Node) -> None:
    """Two copies that started at once found nobody: now their presences are out, and neither has a role yet.

    It is asked more than once: while the two push each other off the same peer's connection, that peer hears little.
    """
    for intervals in TWIN_LOOKS:
        await trio.sleep(intervals * node.domain.timings.presence_ms / 1000)
        await _refuse_elsewhere(node)


async def _refuse_elsewhere(node: Node) -> None:
    interval, ours = node.domain.timings.presence_ms / 1000, node.presences.ours
    sighting = await twins.look(node.network, node.network.peers, node.domain.id, node.id, interval, ours)
    if sighting.elsewhere and sighting.presence is not None:
        at = ", ".join(sighting.presence.addresses) or "an unknown address"
        raise UserError(
            f"{node.directory.key_file}: the node of this key runs elsewhere already ({at}), and two of them would "
            "fork its feed",
            "stop that one, or use a new data directory",
        )


async def _keep_joined(node: Node) -> None:
    """A newcomer opens its feed; a node that was here before waits until peers told it its own head; one whose feed was
    ended for good says so."""
    while True:
        over = node.log.over()
        if over is not None:
            node.health.clear("own head")
            node.health.warn("feed", over)
            await trio.sleep(10)
            continue
        with trio.move_on_after(10):
            await node.log.ready.wait()
        if not node.log.ready.is_set():
            node.health.warn("own head", f"nothing is appended: {node.log.waits_for()}")
            continue
        node.health.clear("own head")
        if node.log.own_seq < 0:
            recovery = commitment(node.directory.recovery_public())
            await node.log.append(Join(recovery, f"farflung/{package.__version__}", node.config.name))
            if node.directory.recovery_file.exists():
                node.logger.info("the recovery key is to be written down: farflung identity recovery show")
        # The head may come into doubt again: another machine may have the key.
        await trio.sleep(10)


async def _watch_history(node: Node, sync: LogSync) -> None:
    """Tell the owner of a newcomer whose peers have all dropped what it needs."""
    while True:
        if sync.unserved:
            node.health.warn("history", "no peer has the log's old entries any more: connect to one that keeps them")
        else:
            node.health.clear("history")
        await trio.sleep(10)


def _elects(node: Node) -> bool:
    """Whether this node is an elector of the next cut."""
    replica = node.log.replica
    return node.id in replica.electors_at(len(replica.cuts) + 1)


async def _elect(node: Node, sync: LogSync) -> None:
    """An elector's part, from the moment on when this node is one."""
    seen = 0
    while node.elector is None:
        if _elects(node):
            node.elector = await open_elector(node.log, node.identity, sync)
        else:
            seen = await node.log.wait_change(seen, timeout=60)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.elector.run)
        nursery.start_soon(_keep, node, "terms", TermWatch(node, node.elector).run)


async def _remember_peers(node: Node) -> None:
    """So that the bootstrap address is not needed again."""
    saved: dict[str, Sequence[str]] = {}
    while True:
        await trio.sleep(5)
        known = {peer_id(peer): addresses for peer, addresses in node.network.known_addresses().items()}
        if known != saved:
            try:
                await trio.to_thread.run_sync(node.directory.save_peers, known)
                saved = dict(known)
                node.health.clear("peers file")
            except OSError as error:
                node.health.warn("peers file", f"{node.directory.peers_file}: {error.strerror}")


def _refuse_unfit(config: Config, domain: Domain) -> None:
    if config.devnet.cheat and not domain.devnet:
        raise UserError(
            f"cheat = {config.devnet.cheat!r} is for a devnet only", f"delete the line ({', '.join(cheats.CHEATS)})"
        )
    if "inference" in config.willing:
        chosen(config.engine, 0, installed=vllm_start.installed())


async def _stop_on_signal(stop: Callable[[], None], on_stop: Callable[[], None]) -> None:
    """The time to end counts from the signal, also where the loop is busy with something long."""
    token = trio.lowlevel.current_trio_token()

    def handle(number: int, frame: object) -> None:
        on_stop()
        token.run_sync_soon(stop)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        await trio.sleep_forever()
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def ending() -> Callable[[], None]:
    """What has this process end ``STOP_SECONDS`` after it is first called, whatever its threads do then. A signal's
    handler may call it: it starts no thread and takes no lock."""
    reader, writer = os.pipe()

    def end() -> None:
        os.read(reader, 1)
        time.sleep(STOP_SECONDS)
        os._exit(0)

    def begin() -> None:
        os.write(writer, b"\0")

    threading.Thread(target=end, daemon=True, name="end-in-time").start()
    return begin
