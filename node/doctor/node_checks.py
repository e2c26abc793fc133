"""Checks of one data directory: configuration, key, domain, lock, ports, log, and what peers know of this node.

1. Nothing is made or changed, and the node's own key speaks to nobody: peers are dialled with a key for the moment.
2. A running daemon of the directory is asked for its status, and what it holds (ports, the log) is its own good right.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio

from node.api.control_client import Unavailable, request
from node.config import Config, resolve
from node.doctor import machine_checks
from node.doctor.finding import ERROR, OK, WARNING, Check, Finding
from node.domain.joining import held
from node.errors import UserError
from node.net.address_text import AddressError, own_addresses, split
from node.net.host import Network, PortBusy, open_network
from node.net.requests import Unreachable
from node.peers import twins
from node.store.data_directory import DataDirectory
from protocol.domain import Domain
from protocol.identity import Identity, node_id, peer_id

DIAL_SECONDS: Final = 4.0
MAX_DIALLED: Final = 8
MAX_INTERVAL: Final = 5.0
"""Longest presence interval that the check of the identity waits out: a public domain's."""
STATUS_SECONDS: Final = 5.0


@dataclass(slots=True)
class Subject:
    """What the checks of a data directory share, as far as it could be read. ``node`` and ``domain`` are None where
    there is none (yet), ``holder`` is the pid of the daemon that runs, ``status`` what that daemon says."""

    directory: DataDirectory
    config: Config = field(default_factory=Config)
    domain: Domain | None = None
    node: bytes | None = None
    boot: int = 0
    holder: int | None = None
    status: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def model(self) -> int:
        """About how many bytes the domain's model has, 0 where the domain is not known."""
        if self.domain is None:
            return 0
        held = [path.stat().st_size for path in self.directory.versions.glob("*/whole.bin")]
        if held:
            return max(held)
        # A manifest holds a hash of 32 bytes for each MiB of weights, and little else for a model of some size.
        return (self.domain.model.manifest.size // 32) << 20


async def examine(directory: DataDirectory) -> Subject:
    """Read what the checks share; what cannot be read becomes a finding at once."""
    subject = Subject(directory)
    found = subject.findings

    def attempt(check: str, read: Callable[[], str]) -> None:
        try:
            found.append(Finding(check, OK, read()))
        except UserError as error:
            message = str(error)
            if error.remedy is not None:
                message = message.removesuffix(f"; {error.remedy}")
            found.append(Finding(check, ERROR, message, error.remedy or ""))
        except OSError as error:
            found.append(Finding(check, ERROR, f"{error.filename}: {error.strerror}", "run as the owner of the folder"))

    attempt("configuration", partial(_configuration, subject))
    attempt("key", partial(_key, subject))
    attempt("domain", partial(_domain, subject))
    with suppress(OSError, ValueError):
        subject.boot = int(directory.boot_file.read_text(encoding="ascii"))
    subject.holder = directory.holder()
    if subject.holder is None:
        found.append(Finding("lock", OK, "no daemon runs on this data directory"))
        return subject
    try:
        subject.status = await request(directory, "status", timeout=STATUS_SECONDS)
        found.append(Finding("lock", OK, f"a daemon runs on this data directory (pid {subject.holder}) and answers"))
    except Unavailable as error:
        remedy = f"it may still be starting; else: kill {subject.holder}"
        found.append(Finding("lock", WARNING, f"a daemon holds the lock (pid {subject.holder}): {error}", remedy))
    return subject


def _configuration(subject: Subject) -> str:
    subject.config = resolve(subject.directory.config_file, environment=os.environ)
    if subject.directory.config_file.exists():
        return f"{subject.directory.config_file} is in order"
    return "there is no farflung.toml; the defaults apply"


def _key(subject: Subject) -> str:
    directory = subject.directory
    if not os.path.lexists(directory.key_file):
        if directory.log_database.exists():
            raise UserError(
                f"{directory.key_file}: the key of the node that lived here is gone", "put it back from a backup"
            )
        return "there is no key yet; the first start makes one"
    subject.node = directory.read_identity().node
    return f"{peer_id(subject.node)}, for its owner only"


def _domain(subject: Subject) -> str:
    subject.domain = held(subject.directory)
    if subject.domain is None:
        return "no domain yet: farflung join ADDRESS"
    return f"{subject.domain.name} ({subject.domain.id.hex()[:16]}…)"


def checks(subject: Subject) -> list[Check]:
    """All checks, of the machine and of the directory."""
    return [
        Check("python", machine_checks.python),
        Check("machine", machine_checks.machine),
        Check("torch", machine_checks.torch),
        Check("sandbox", machine_checks.sandboxed),
        Check("memory", partial(machine_checks.memory, subject.model)),
        Check("disk", partial(machine_checks.disk, subject.directory, subject.model)),
        Check("clock", machine_checks.clock),
        Check("ports", partial(ports, subject)),
        Check("log", partial(log, subject)),
        Check("peers", partial(peers, subject)),
        Check("addresses", partial(addresses, subject)),
    ]


# Ports and addresses


async def ports(subject: Subject) -> list[Finding]:
    """Is each listening address free, or held by this node's own daemon?"""
    return [_port(subject, address) for address in (*subject.config.listen, *subject.config.bulk.listen)]


def _port(subject: Subject, address: str) -> Finding:
    kind, host, port = split(address)
    if kind not in ("ip4", "ip6"):
        return Finding("ports", ERROR, f"{address} is a name", "give an IP address to listen on")
    if port == 0:
        return Finding("ports", OK, f"{address}: the node takes a free port")
    status = subject.status or {}
    taken = [*status.get("addresses", ()), *status.get("bulk", {}).get("listening", ())]
    if any(split(own)[2] == port for own in taken):
        return Finding("ports", OK, f"{address} is held by this node's own daemon")
    with socket.socket(socket.AF_INET6 if kind == "ip6" else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As a listening socket of the node's: one that was closed a moment ago does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if kind == "ip6":
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            reason = f"{address}: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE and subject.holder is not None:
                remedy = "it is probably held by this node's daemon, which does not answer"
                return Finding("ports", WARNING, reason, remedy)
            remedy = {
                errno.EADDRINUSE: f"stop the program that holds it (ss -tlnp 'sport = :{port}'), or listen elsewhere",
                errno.EACCES: "choose a port above 1023",
            }.get(error.errno or 0, "listen on an address of this machine")
            return Finding("ports", ERROR, reason, remedy)
    return Finding("ports", OK, f"{address} is free")


async def addresses(subject: Subject) -> list[Finding]:
    """Can others dial this node?"""
    status = subject.status
    if status is not None and status.get("inbound", 0) > 0:
        return [Finding("addresses", OK, f"others dial this node: {status['inbound']} of {status['peers']} peers did")]
    if status is not None:
        own = list(status.get("addresses", ()))
    else:
        own = own_addresses(subject.config.listen, subject.node or bytes(32))
    hosts = list(dict.fromkeys(split(address)[1] for address in own))
    shown = ", ".join(hosts) or "none known before the node runs"
    if subject.domain is not None and subject.domain.devnet:
        return [Finding("addresses", OK, f"{shown} (a devnet)")]
    if hosts and all(_private(host) for host in hosts):
        port = next((split(address)[2] for address in own), 4001)
        leave = "or leave it: the node then only dials others, and never relays"
        remedy = f"forward TCP port {port} to this machine, {leave}"
        return [Finding("addresses", WARNING, f"only addresses of a private network: {shown}", remedy)]
    return [Finding("addresses", OK, f"{shown}; nobody has dialled them yet" if status is not None else shown)]


def _private(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return False


# The log


async def log(subject: Subject) -> list[Finding]:
    """Is the log's database sound? The signatures are ``farflung log verify``'s business."""
    path = subject.directory.log_database

    def read() -> Finding:
        try:
            if not path.exists():
                return Finding("log", OK, "no log yet")
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
                (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
                (entries,) = database.execute("SELECT count(*) FROM entries").fetchone()
        except sqlite3.Error as error:
            return Finding("log", ERROR, f"{path}: {error}", _LOG_REMEDY)
        except OSError as error:
            return Finding("log", ERROR, f"{path}: {error.strerror}", "run as the owner of the folder")
        if verdict != "ok":
            return Finding("log", ERROR, f"{path}: {' '.join(str(verdict).split())}", _LOG_REMEDY)
        return Finding("log", OK, f"{entries} entries, the database is sound")

    # mypy reads the star of *args: Unpack[…] wrongly.
    return [await trio.to_thread.run_sync(read, abandon_on_cancel=True)]  # type: ignore[call-arg]


_LOG_REMEDY: Final = "stop the node and move its log folder away: peers give it back, with this node's own entries"


# Peers and the identity


async def peers(subject: Subject) -> list[Finding]:
    """Do the known peers answer, and does none of them hear this node from elsewhere?"""
    if subject.domain is None:
        return [Finding("peers", OK, "no domain yet, so nobody to ask")]
    known = _known(subject)
    if not known:
        text = "no peer is known yet" if subject.status is None else "nobody has joined yet"
        return [Finding("peers", OK, f"{text}; whether this node runs elsewhere cannot be asked")]
    identity, tag = Identity(secrets.token_bytes(32)), subject.domain.id.hex()[:16]
    try:
        async with open_network(identity, listen=(), domain_tag=tag) as network:
            reached = await _dial(network, known)
            total = min(len(known), MAX_DIALLED)
            if not reached:
                remedy = "see this machine's network and firewall, and whether the peers run"
                return [Finding("peers", ERROR, f"none of {total} known peers answers", remedy)]
            return [
                Finding("peers", OK, f"{len(reached)} of {total} known peers answer"),
                await _elsewhere(subject, subject.domain, network, reached),
            ]
    except PortBusy as error:
        return [Finding("peers", WARNING, f"could not be asked: {error}")]


def _known(subject: Subject) -> dict[bytes, list[str]]:
    found: dict[bytes, list[str]] = {}
    for address in subject.config.bootstrap:
        found.setdefault(node_id(address.rpartition("/")[2]), []).append(address)
    for peer, texts in subject.directory.known_peers().items():
        found.setdefault(node_id(peer), []).extend(texts)
    if subject.node is not None:
        found.pop(subject.node, None)
    return found


async def _dial(network: Network, known: dict[bytes, list[str]]) -> list[bytes]:
    """The peers out of ``known`` that answer at one of their addresses."""
    reached = []

    async def dial(peer: bytes, texts: list[str]) -> None:
        for address in list(dict.fromkeys(texts))[:3]:
            with suppress(Unreachable, AddressError):
                await network.connect(address, timeout=DIAL_SECONDS)
                reached.append(peer)
                return

    with trio.move_on_after(DIAL_SECONDS):
        async with trio.open_nursery() as nursery:
            for peer, texts in list(known.items())[:MAX_DIALLED]:
                nursery.start_soon(dial, peer, texts)
    return reached


async def _elsewhere(subject: Subject, domain: Domain, network: Network, reached: list[bytes]) -> Finding:
    """Does a node with this key run, that is not the daemon of this directory?"""
    node = subject.node
    if node is None:
        return Finding("identity", OK, "no key yet, so no other node has it")
    remedy = "stop the other one for good before this one is started: two nodes must never run with one key"
    if subject.holder is not None:
        heard = (await twins.sighted(network, reached, domain.id, node)).values()
        newer = next((one for one in heard if one is not None and one.boot > subject.boot), None)
        if newer is None:
            return Finding("identity", OK, "peers hear the daemon of this directory and no other with its key")
        return Finding("identity", ERROR, f"another node runs with this key at {', '.join(newer.addresses)}", remedy)
    interval = min(domain.timings.presence_ms / 1000, MAX_INTERVAL)
    sighting = await twins.sight(network, reached, domain.id, node, interval)
    if sighting.presence is None:
        return Finding("identity", OK, f"none of {sighting.answered} peers hears this node")
    at = ", ".join(sighting.presence.addresses) or "an unknown address"
    # A start that this directory does not know of is proof: nobody else can sign such a presence.
    if sighting.elsewhere or sighting.presence.boot > subject.boot:
        return Finding("identity", ERROR, f"this node does not run here, but it runs at {at}", remedy)
    return Finding("identity", OK, "peers heard this node until it was stopped, and no longer")
