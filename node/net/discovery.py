"""Who else is there: the address book, and the task that keeps this node connected.

libp2p's own discovery forgets a seed after three failures, dials one address of a peer only, and waits 60 s after a
failure; here the application owns all of it.

1. Names in addresses are resolved by the system's resolver at each dial, all results and all addresses of a peer are
   tried in turn.
2. Unconnected peers are dialled with exponential backoff up to ``MAX_BACKOFF`` seconds, seeds up to ``SEED_BACKOFF``
   and for ever, even while other peers are connected: else two halves of a network that started apart stay apart.
3. Of two nodes that know each other, the one with the lower id dials at once and the other a little later, so that
   they seldom connect twice.
4. The book is bounded; a peer that was never reached is forgotten first, a seed never.
5. Addresses are a stranger's words, and nobody is to be flooded because strangers named him. A host at which dials
   fail, whoever named it, is dialled ``VAIN_DIALS`` times in a row and then once in ``VAIN_SECONDS``, until one
   succeeds; a seed's host is the operator's choice, and this machine is its own. A peer that names new addresses again
   and again has them tried at once ``FRESH`` times and then once in ``FRESH_SECONDS``.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from node.net.address_text import MAX_ADDRESSES, Address
from node.net.requests import Unreachable
from node.net.token_buckets import Buckets

log = logging.getLogger(__name__)

MAX_BACKOFF: Final = 60.0
SEED_BACKOFF: Final = 10.0
MAX_PEERS: Final = 2048
SHORT: Final = 5.0
"""A connection that lasts fewer seconds counts as a failure."""

VAIN_DIALS: Final = 16
VAIN_SECONDS: Final = 10.0
MAX_HOSTS: Final = 1024
MAX_PLACES: Final = 4
"""IP addresses of one name that are dialled."""
FRESH: Final = 3
FRESH_SECONDS: Final = 60.0

CONCURRENT_DIALS: Final = 8
POLL: Final = 0.5
"""Seconds between looks at the book while a peer's time has come that may not be dialled yet."""

PAUSE: Final = 0.1
"""Seconds between looks at the book, whatever the news."""

CHECK: Final = 10.0
"""Seconds between looks at connected peers; a loss is noticed at once."""


async def _resolve(address: Address) -> list[str]:
    """The IP addresses to dial; raises ``OSError`` (``socket.gaierror``) if the name has none."""
    if address.kind in ("ip4", "ip6"):
        return [address.host]
    family = {"dns": 0, "dns4": trio.socket.AF_INET, "dns6": trio.socket.AF_INET6}[address.kind]
    found = await trio.socket.getaddrinfo(address.host, address.port, family, trio.socket.SOCK_STREAM)
    return list(dict.fromkeys(str(item[4][0]) for item in found))[:MAX_PLACES]


@dataclass(slots=True)
class BookEntry:
    """What the book knows about one peer; times are of trio's clock."""

    addresses: list[Address] = field(default_factory=list)
    seed: bool = False
    reached: bool = False
    failures: int = 0
    next_dial: float = 0.0
    met: float = 0.0


class AddressBook:
    """Addresses by node id, newest first."""

    def __init__(self, own: bytes, most: int = MAX_PEERS) -> None:
        self._own = own
        self._most = most
        self._fresh = Buckets(FRESH, 1 / FRESH_SECONDS, most)
        """For new addresses that are tried at once, by node."""
        self.entries: dict[bytes, BookEntry] = {}
        self.news = trio.Event()
        """Set where somebody's time may come sooner than ``next_due`` said; who waits for it renews it."""

    def learn(self, node: bytes, addresses: Sequence[Address], now: float, *, seed: bool = False) -> None:
        """Put ``addresses`` in front of what is known of ``node``; a new one is tried without delay."""
        if node == self._own:
            return
        entry = self.entries.get(node)
        if entry is None:
            if len(self.entries) >= self._most and not self._forget_one():
                return
            entry = self.entries[node] = BookEntry(next_dial=now + (1.0 if node < self._own else 0.0))
        entry.seed = entry.seed or seed
        usable = [address for address in addresses if address.port and address.node in (None, node)]
        usable = [Address(address.kind, address.host, address.port, node) for address in usable]
        if any(address not in entry.addresses for address in usable) and (seed or self._fresh.take(node, 1, now)):
            entry.next_dial = min(entry.next_dial, now + (1.0 if node < self._own else 0.0))
            self.news.set()
        entry.addresses = list(dict.fromkeys([*usable, *entry.addresses]))[:MAX_ADDRESSES]

    def _forget_one(self) -> bool:
        others = [node for node, entry in self.entries.items() if not entry.seed]
        if not others:
            return False
        del self.entries[next((node for node in others if not self.entries[node].reached), others[0])]
        return True

    def connected(self, node: bytes, now: float) -> None:
        """The peer was met."""
        if (entry := self.entries.get(node)) is not None:
            entry.reached = True
            entry.met = now

    def disconnected(self, node: bytes, now: float) -> None:
        """The peer was lost: try again soon, but less and less so while it hangs up right away (a ban looks so)."""
        entry = self.entries.get(node)
        if entry is None:
            return
        entry.failures = min(entry.failures + 1, 10) if now - entry.met < SHORT else 0
        delay = random.uniform(0.25, 0.5) * 2**entry.failures  # noqa: S311
        entry.next_dial = now + min(delay, SEED_BACKOFF if entry.seed else MAX_BACKOFF)
        if node < self._own:
            entry.next_dial += 0.5
        self.news.set()

    def failed(self, node: bytes, now: float) -> None:
        """A dial failed: back off."""
        if (entry := self.entries.get(node)) is not None:
            entry.failures = min(entry.failures + 1, 10)
            limit = SEED_BACKOFF if entry.seed else MAX_BACKOFF
            entry.next_dial = now + min(random.uniform(0.5, 1) * 2**entry.failures, limit)  # noqa: S311

    def postpone(self, node: bytes, now: float) -> None:
        """The peer is connected: there is nothing to do until it is lost."""
        if (entry := self.entries.get(node)) is not None:
            entry.next_dial = (now // CHECK + 1) * CHECK  # the same moment for all, so that one look does

    def next_due(self) -> float:
        """When the next peer's time comes, or came."""
        return min((entry.next_dial for entry in self.entries.values() if entry.addresses), default=math.inf)

    def due(self, now: float) -> list[bytes]:
        """Peers whose time to be dialled has come, seeds first."""
        ready = [node for node, entry in self.entries.items() if entry.next_dial <= now and entry.addresses]
        return sorted(ready, key=lambda node: not self.entries[node].seed)


class PeerManager:
    """Dials what the book says is due.

    ``dial(ip address, port, node)`` connects or raises ``Unreachable``; ``may_dial(node)`` tells whether it should now.
    """

    def __init__(
        self,
        book: AddressBook,
        *,
        dial: Callable[[str, int, bytes], Awaitable[None]],
        connected: Callable[[bytes], bool],
        may_dial: Callable[[bytes], bool],
    ) -> None:
        self._book = book
        self._dial = dial
        self._connected = connected
        self._may_dial = may_dial
        self._locks: dict[bytes, trio.Lock] = {}
        self._vain = Buckets(VAIN_DIALS, 1 / VAIN_SECONDS, MAX_HOSTS)
        """For dials that fail, by host."""

    async def run(self) -> None:
        """Keep this node connected, for ever."""
        busy: set[bytes] = set()

        async def attempt(node: bytes) -> None:
            try:
                await self.reach(node)
            except Unreachable as error:
                log.debug("%s", error)
            finally:
                busy.discard(node)

        async with trio.open_nursery() as nursery:
            while True:
                news = self._book.news = trio.Event()
                for node in self._book.due(trio.current_time()):
                    if len(busy) >= CONCURRENT_DIALS:
                        break
                    if self._connected(node):
                        self._book.postpone(node, trio.current_time())
                    elif node not in busy and self._may_dial(node):
                        busy.add(node)
                        nursery.start_soon(attempt, node)
                await trio.sleep(PAUSE)
                with trio.move_on_at(max(self._book.next_due(), trio.current_time() + POLL - PAUSE)):
                    await news.wait()

    async def reach(self, node: bytes) -> None:
        """Connect to ``node`` by the addresses in the book; raises ``Unreachable``."""
        entry = self._book.entries.get(node)
        if entry is None or not entry.addresses:
            raise Unreachable(f"node {node.hex()[:8]}: no address is known")
        lock = self._locks.setdefault(node, trio.Lock())
        async with lock:
            try:
                error = Unreachable("")
                for address in list(entry.addresses):
                    if self._connected(node):
                        return
                    try:
                        await self.connect(address, limited=not entry.seed)
                        return
                    except Unreachable as failure:
                        error = failure
                self._book.failed(node, trio.current_time())
                raise error
            finally:
                if not lock.statistics().tasks_waiting:
                    self._locks.pop(node, None)

    async def connect(self, address: Address, *, limited: bool = False) -> None:
        """Connect to the node that ``address`` names, by that address only; raises ``Unreachable``.

        ``limited`` where a stranger named it (rule 5).
        """
        if address.node is None:
            raise Unreachable(f"{address}: the address names no peer (…/p2p/PEER)")
        try:
            hosts = await _resolve(address)
        except OSError as error:
            raise Unreachable(f"{address}: the name cannot be resolved ({error})") from None
        reason = "no address"
        for host in hosts:
            if limited and not self._may_fail(host):
                reason = "too many dials there were in vain"
                continue
            try:
                await self._dial(host, address.port, address.node)
                self._vain.fill(host)
                return
            except Unreachable as error:
                reason = str(error)
        raise Unreachable(f"{address}: {reason}")

    def _may_fail(self, host: str) -> bool:
        """Whether a host may be dialled although that may be in vain once more."""
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            return True
        return self._vain.take(host, 1, trio.current_time())
