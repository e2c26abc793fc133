"""The wiring of one node: which parts it has, what each is handed, in which order they start and stop.

Start: lock, key, genesis, log, network, own head confirmed, join, presence, role; each step needs the earlier ones.
Stop: everything is cancelled at once; what was acknowledged is on disk already, and stopping appends nothing. The
process ends within ``node.health.ending.STOP_SECONDS`` of the signal, or of its owner's wish, in the midst of anything.
The daemon imports neither torch nor any task library: children do (``node.workers``, ``node.tasks``).

Once it serves, nothing but a signal or its owner's wish ends it: every service runs under ``node.health.supervisor``.
"""

from __future__ import annotations

import faulthandler
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from node.api.control_socket import ControlSocket
from node.api.pulls import Pulls
from node.config import Config
from node.context import Node
from node.domain import joining
from node.domain.founding_files import keep_founding_files
from node.errors import UserError, innermost
from node.health import supervisor
from node.health.ending import ending, stop_on_signal
from node.health.supervisor import Service
from node.health.warnings import Health
from node.log import blob_retention, own_feed
from node.log.log_opening import load
from node.log.replicated_log import LogService
from node.log.replication import LogSync
from node.log.signature_checkers import open_checkers
from node.log.ticket_heap import TicketHeap
from node.log.ticket_seeker import TicketSeeker
from node.net.address_text import AddressError
from node.net.blob_exchange import BlobExchange, serve_blobs, serve_chunks, serve_haves
from node.net.host import PortBusy, open_network
from node.peers import hardware, peers_file, twins
from node.peers.own_state import OwnState
from node.peers.presences import Presences
from node.roles import cheats, inference, trainer, validator
from node.roles.engine_client import chosen, vllm_installed
from node.roles.holder_progress import HolderProgress
from node.roles.role_manager import Lives, RoleManager
from node.roles.rollout_pool import Pool
from node.roles.term_watch import ElectorPart
from node.roles.workbench import Engines, Evaluations, OpenTasks
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from node.store.log_store import open_log_store
from node.store.version_store import VersionStore
from node.systemd import service_manager, watchdog
from node.tasks.task_service import TaskService
from node.telemetry import metrics, tracking
from node.weights import offers, second_holder
from node.weights.bulk.bulk_process import BulkProcess, StartBulk, start_child
from node.weights.bulk.token_exchange import TokenExchange
from node.weights.following import WeightsService
from node.weights.held import WeightsMeans
from node.workers.child_process import OpenWorker, open_worker
from protocol.domain import Domain
from protocol.identity import node_id

GENESIS_PATIENCE: Final = 30.0
"""Seconds that a first start waits for a bootstrap peer to answer."""
NO_MANAGER: Final = service_manager.Manager()
ROOM: Final = 200 << 20
"""Free bytes without which a node does not start: a log that cannot be written would stop it at once."""
PRESENCE: Final = "publishing presences"
ROLES: Final = "taking roles"


@dataclass(frozen=True, slots=True)
class Machinery:
    """How a node's parts start other processes. Tests bring their own."""

    open_worker: OpenWorker = open_worker
    tasks: OpenTasks = TaskService
    start_bulk: StartBulk = start_child


class Parts:
    """The parts of one node, each made with what it uses; nothing runs yet. Made within trio. Roles see them as a
    ``Workbench``, requests as a ``Panel``.

    ``boot`` counts the starts of this data directory; ``stop`` ends the daemon; ``lives`` replaces what it does in its
    roles.
    """

    def __init__(
        self,
        node: Node,
        boot: int,
        stop: Callable[[], None],
        machinery: Machinery,
        manager: service_manager.Manager = NO_MANAGER,
        lives: Lives | None = None,
    ) -> None:
        config, directory = node.config, node.directory
        self.node = node
        self.manager = manager
        self.own = OwnState(node, pause_at_step=config.devnet.pause_at_step)
        self.presences = Presences(node, self.own, boot)
        self.sync = LogSync(node.log, node.network, interval=node.domain.timings.presence_ms / 1000)
        self.blobs = BlobExchange(BlobStore(directory.blobs), node.network)
        quota, reserve = config.weights.quota << 20, config.weights.reserve << 20
        self.versions = VersionStore(directory.versions, quota=quota, reserve=reserve)
        self.bulk = BulkProcess(node, self.own, start=machinery.start_bulk)
        self.tokens = TokenExchange(node, self.bulk)
        means = WeightsMeans(
            node,
            self.own,
            self.presences,
            self.versions,
            self.blobs,
            self.bulk,
            self.tokens,
            machinery.open_worker,
        )
        self.weights = WeightsService(means)
        self.pool = Pool(node, self.blobs, self.presences)
        self.metrics = metrics.Metrics()
        self.engines = Engines(node, self.own, self.blobs, machinery.open_worker, machinery.tasks)
        self.evaluations = Evaluations()
        self.failed_audits: Counter[bytes] = Counter()
        self.roles = RoleManager(node, self.own, self.presences, self._lives() if lives is None else lives)
        tickets = TicketHeap(node.log.replica)
        self.seeker = TicketSeeker(node, tickets)
        progress = HolderProgress(node, self.own, self.pool, self.blobs)
        self.elector = ElectorPart(node, self.sync, self.presences, tickets, progress)
        self.pulls = Pulls(node, self.weights)
        self.stop = stop
        self.control = ControlSocket(self)
        self._machinery = machinery

    def _lives(self) -> Lives:
        return {
            "trainer": partial(trainer.run, self),
            "relay": partial(offers.push, self.node, self.weights),
            "validator": partial(validator.run, self),
            "inference": partial(inference.run, self),
        }

    def serve(self) -> None:
        """Answer peers from now on. Only once."""
        network, tokens = self.node.network, self.tokens
        self.sync.serve()
        network.on_connect(self.sync.soon)
        network.prefer(self.node.log.ledger.member)
        joining.serve(network, self.node.directory.genesis() or b"")
        read = partial(partial, trio.to_thread.run_sync)
        serve_blobs(network, read(self.blobs.store.get_range), may_read=tokens.may_read)
        serve_chunks(network, read(self.versions.read_chunk), may_have=tokens.may_have)
        serve_haves(network, read(self.versions.bitmap), may_have=tokens.may_have)
        tokens.serve()
        offers.serve(self.node, self.weights, self.presences)
        second_holder.serve(self.node, self.weights, self.blobs)
        twins.serve(network, self.presences)
        self.presences.listen()
        self.seeker.listen()

    def services(self) -> dict[str, Service]:
        """What runs for as long as the node does, by the name that a failure is told under."""
        node, own, weights = self.node, self.own, self.weights
        file = node.directory.path / metrics.NAME
        open_worker = self._machinery.open_worker
        services: dict[str, Service] = {
            "serving the control socket": self.control.run,
            "comparing logs": self.sync.run,
            "writing metrics": partial(self.metrics.run, file, node.health),
            "feeding trackers": partial(tracking.run, node, own, self.metrics, weights, open_worker=open_worker),
            "fetching what the genesis names": partial(keep_founding_files, node, self.blobs),
            "looking at the hardware": partial(hardware.keep_claimed, own),
            "asking for admission": self.seeker.run,
            "keeping the own feed": partial(own_feed.keep_joined, node),
            "watching the log's past": partial(own_feed.watch_history, node, self.sync.unserved),
            "clearing out files": partial(blob_retention.keep_clear, node, self.blobs.store),
            "following weights": weights.run,
            "fetching on demand": self.pulls.run,
            "remembering peers": partial(peers_file.remember, node),
            "voting": self.elector.run,
            PRESENCE: self.presences.run,
            ROLES: self.roles.run,
            "sending and fetching weights": self.bulk.run,  # last: a child's start takes a core for a moment
        }
        if self.manager.address is not None:
            progress = partial(watchdog.progress, node.log, self.roles)
            status = partial(watchdog.status_line, node, own, weights)
            services["feeding the watchdog"] = partial(self.manager.feed, progress, status)
        return services

    async def keep(self, services: Mapping[str, Service]) -> None:
        """Run services for ever, whatever becomes of them."""
        async with trio.open_nursery() as nursery:
            for name, service in services.items():
                nursery.start_soon(supervisor.keep, name, service, self.node.health)

    async def run(self) -> None:
        """The node's life: its start, and then all services. Raises ``UserError`` where its user must mend something
        before it can begin."""
        node, services = self.node, self.services()
        self.serve()
        with ExitStack() as stack:
            stack.enter_context(self.bulk.ports.open())
            await self.control.open()
            await self.elector.open()
            late = {name: services.pop(name) for name in (PRESENCE, ROLES)}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.keep, services)
                node.logger.info("%s serves at %s", node.config.name, ", ".join(node.network.addresses))
                self.manager.send(READY=1, STATUS=watchdog.status_line(node, self.own, self.weights))
                await twins.refuse_copy(node, self.presences)
                nursery.start_soon(self.keep, late)
                await twins.refuse_twin(node, self.presences)


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
        try:
            trio.run(main, directory, config, manager, ending())
        except* (UserError, PortBusy, AddressError) as group:
            raise UserError(str(innermost(group))) from None


async def main(
    directory: DataDirectory,
    config: Config,
    manager: service_manager.Manager = NO_MANAGER,
    on_stop: Callable[[], None] = lambda: None,
    machinery: Machinery = Machinery(),
) -> None:
    """The daemon's life inside trio. ``manager`` is told when it serves, how it is, and when it stops; ``on_stop`` is
    called when it is to stop, also within a signal's handler."""
    fresh = not directory.exists()
    identity = directory.identity()
    async with trio.open_nursery() as nursery:

        def stop() -> None:
            on_stop()
            manager.send(STOPPING=1, STATUS="stopping")
            nursery.cancel_scope.cancel()

        nursery.start_soon(stop_on_signal, stop, on_stop)
        domain = joining.held(directory)
        if domain is None:
            manager.send(STATUS="asks for the domain's genesis")
            domain = await joining.fetch(identity, directory, config.bootstrap, GENESIS_PATIENCE)
        _refuse_unfit(config, domain)
        known = {node_id(peer): addresses for peer, addresses in directory.known_peers().items()}
        for address in config.bootstrap:
            known.setdefault(node_id(address.rpartition("/")[2]), (address,))
        manager.send(STATUS="reads the log")
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
            logger = logging.getLogger("farflung")
            node = Node(identity, domain, config, directory, network, log, Health(logger), logger)
            await Parts(node, directory.next_boot(), stop, machinery, manager).run()


def _refuse_unfit(config: Config, domain: Domain) -> None:
    if config.devnet.cheat and not domain.devnet:
        raise UserError(
            f"cheat = {config.devnet.cheat!r} is for a devnet only", f"delete the line ({', '.join(cheats.CHEATS)})"
        )
    if "inference" in config.willing:
        chosen(config.engine, 0, installed=vllm_installed())
