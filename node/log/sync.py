"""Replication: gossip carries what is new, anti-entropy guarantees that everything arrives.

1. Own entries, cuts and grants are gossiped once they are stored. Gossip is a hint: it may be lost or out of order.
2. Anti-entropy with one peer: compare summaries; equal, done. Else fetch forks, then cuts page by page with the
   entries that each page covers, then grants, then the tails that no cut covers yet, found by 256 bucket digests.
   Everything is verified in order; a peer that offers nothing new ends the round.
3. Every answer is bounded, every request has a deadline, and a round asks on only as long as it brings something new.
4. A peer's mistake is its own: it is blamed and the round goes on or ends; nobody else's work is disturbed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import trio

from node.log import wire
from node.log.service import LogService, News, Received
from node.log.wire import Summary
from node.net.rpc import Unreachable
from protocol import codec
from protocol import entry as entries
from protocol.errors import PeerError
from protocol.heads import MAX_RANGE, Head, RangeRequest, plan

logger = logging.getLogger(__name__)

TOPIC: Final = "log"
REQUEST_TIMEOUT: Final = 10.0
ROUND_TIMEOUT: Final = 120.0
"""A round that takes longer is broken off; what it brought stays."""

PATIENCE: Final = 3.0
"""After so many seconds of a round the next peer's begins beside it."""

MAX_ROUNDS: Final = 8
MAX_BLAMES: Final = 8
"""Mistakes of one round after which it is broken off."""

BYTES_PER_SECOND: Final = 32 << 20
BURST: Final = 64 << 20
"""What one peer gets: so many bytes at once, and then so many a second."""

REQUESTS_AT_ONCE: Final = 3
"""Requests for entries that are under way together: while one answer is verified, the next ones come."""

ENTRIES_AT_ONCE: Final = 2048
"""Entries that one request asks for: about as many as an answer has room for."""

QUEUE: Final = 1024
"""Own news that wait to be gossiped; beyond that they travel by anti-entropy alone."""

Handler = Callable[[bytes, bytes], Awaitable[bytes]]


class Transport(Protocol):
    """What replication needs of the network."""

    @property
    def peers(self) -> Iterable[bytes]:
        """Node ids of the connected peers."""

    async def request(self, peer: bytes, protocol: str, payload: bytes, *, timeout: float, max_response: int) -> bytes:
        """Ask a peer; raises ``Unreachable`` or ``PeerError``."""

    def serve(self, protocol: str, handler: Handler, *, max_request: int) -> None:
        """Answer requests."""

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip."""

    def subscribe(self, topic: str, handler: Callable[[bytes, bytes], Awaitable[None]]) -> None:
        """Hear gossip: ``handler(origin, data)``."""

    def blame(self, peer: bytes, error: PeerError) -> None:
        """Count a peer's mistake."""


@dataclass(slots=True)
class SyncResult:
    """One round with one peer: bytes of payload each way, objects taken, and mistakes of the peer."""

    sent: int = 0
    received: int = 0
    added: int = 0
    errors: list[PeerError] = field(default_factory=list)


class LogSync:
    """Keeps one node's log equal to its peers'. ``interval`` is in seconds."""

    def __init__(self, service: LogService, transport: Transport, *, interval: float) -> None:
        self.service = service
        self.transport = transport
        self.protocol = f"/farflung/{service.domain.id.hex()[:16]}/log/1"
        self.rounds = 0
        """Rounds finished, for tests and the status page."""
        self.unserved: set[bytes] = set()
        """Peers that know newer cuts and gave nothing of the entries that these cover: they have dropped them."""
        self._interval = interval
        self._soon = trio.Event()
        self._wanted: dict[bytes, None] = {}
        self._busy: set[bytes] = set()
        self._catching_up = trio.Lock()
        self._last: dict[bytes, int] = {}
        # What each peer was sent lately, less what time has paid off: (bytes, when).
        self._debts: dict[bytes, tuple[float, float]] = {}
        self._outgoing, self._news = trio.open_memory_channel[News](QUEUE)

    def connected(self, peer: bytes) -> None:
        """A peer appeared: compare logs with it at once."""
        self.soon(peer)

    def soon(self, peer: bytes) -> None:
        """Compare logs with ``peer`` without waiting for its turn."""
        self._wanted[peer] = None
        self._soon.set()

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, gossip and compare, for ever."""
        self.service.subscribe(self._enqueue)
        self.transport.serve(self.protocol, self.handle, max_request=wire.MAX_REQUEST)
        self.transport.subscribe(TOPIC, self.hear)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._publish)
            task_status.started()
            await self._compare()

    # Gossip

    def _enqueue(self, news: News) -> None:
        # Fork proofs are worth telling whoever found them; the rest is its maker's to tell.
        if news.own or news.forks:
            try:
                self._outgoing.send_nowait(news if news.own else News(forks=news.forks))
            except trio.WouldBlock:
                logger.debug("gossip cannot keep up with the own log")

    async def _publish(self) -> None:
        async for news in self._news:
            data = wire.news(
                [entry.encode() for entry in news.entries],
                [cut.encode() for cut in news.cuts],
                [grant.encode() for grant in news.grants],
                [fork.encode() for fork in news.forks],
            )
            if data is not None:
                await self.transport.publish(TOPIC, data)

    async def hear(self, origin: bytes, data: bytes) -> None:
        """Take a gossip message. Raises ``PeerError`` where it holds something bad (the good parts are taken)."""
        new_entries, cuts, grants, forks = wire.parse_news(data)
        received = await self.service.receive(entries=new_entries, cuts=cuts, grants=grants, forks=forks, origin=origin)
        if received.waiting:
            self.soon(origin)
        if received.errors:
            raise received.errors[0]

    # Comparing

    async def _compare(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                peer = self._next()
                if peer is not None:
                    done = trio.Event()
                    self._busy.add(peer)
                    nursery.start_soon(self._round, peer, done)
                    # A peer that stalls keeps its own round waiting, not the others.
                    with trio.move_on_after(PATIENCE):
                        await done.wait()
                    # However often peers ask for it, comparing leaves the daemon time for everything else.
                    await trio.sleep(self._interval / 20)
                if not self._wanted or peer is None:
                    self._soon = trio.Event()
                    with trio.move_on_after(self._interval):
                        await self._soon.wait()

    def _next(self) -> bytes | None:
        """Whom to compare with: who was asked for, then whoever waits longest."""
        connected = set(self.transport.peers)
        self.unserved &= connected
        self._debts = {peer: debt for peer, debt in self._debts.items() if peer in connected}
        self._last = {peer: turn for peer, turn in self._last.items() if peer in connected}
        self._wanted = {peer: None for peer in self._wanted if peer in connected}
        free = connected - self._busy
        if len(self._busy) >= MAX_ROUNDS:
            return None
        for peer in self._wanted:
            if peer in free:
                del self._wanted[peer]
                return peer
        return min(sorted(free), key=lambda peer: self._last.get(peer, -1), default=None)

    async def _round(self, peer: bytes, done: trio.Event) -> None:
        self._last[peer] = max(self._last.values(), default=0) + 1
        try:
            with trio.fail_after(ROUND_TIMEOUT):
                await self.sync_with(peer)
        except PeerError as error:
            self.transport.blame(peer, error)
        except (Unreachable, trio.TooSlowError) as error:
            logger.debug("comparing logs with %s: %s", peer.hex()[:8], error)
        self.rounds += 1
        self._busy.discard(peer)
        done.set()

    async def sync_with(self, peer: bytes) -> SyncResult:
        """One round of anti-entropy with ``peer``. Bad objects are blamed and skipped; raises ``PeerError`` where the
        peer breaks the protocol itself, ``Unreachable`` where it does not answer."""
        session = _Session(self, peer)
        theirs = await session.hello()
        ours = summary(self.service)
        self.service.height_told = max(self.service.height_told, theirs.height)
        if not theirs.agrees(ours):
            if theirs.side != ours.side:
                await session.forks()
                await session.grants()
            if theirs.height > ours.height:
                async with self._turn():
                    await session.cuts(theirs.height)
            if theirs.heads_root != self.service.replica.heads_root():
                await session.tails()
        if self.service.checkpoints.lacking:
            await session.checkpoint()
        self.service.told(peer)
        return session.result

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Rounds side by side would fetch the same cuts: one does it, and another only if that takes too long."""
        with trio.move_on_after(PATIENCE) as patience:
            await self._catching_up.acquire()
        try:
            yield
        finally:
            if not patience.cancelled_caught:
                self._catching_up.release()

    async def ask(self, peer: bytes, payload: bytes) -> bytes:
        """One request of the log protocol."""
        return await self.transport.request(
            peer, self.protocol, payload, timeout=REQUEST_TIMEOUT, max_response=wire.MAX_ANSWER
        )

    def blame(self, peer: bytes, error: PeerError) -> None:
        """Count a mistake of ``peer``."""
        self.transport.blame(peer, error)

    # Answering

    async def handle(self, peer: bytes, data: bytes) -> bytes:
        """Answer one request. Raises ``PeerError`` for a malformed one."""
        op, argument = wire.parse_request(data)
        replica = self.service.replica
        answer: Any
        match op:
            case "hello":
                theirs = Summary(*argument)
                mine = summary(self.service)
                if theirs.height > mine.height or theirs.term > mine.term:
                    self.soon(peer)
                answer = [mine.to_value(), await self._newest_of(peer, theirs.own)]
            case "buckets":
                answer = replica.bucket_digests()
            case "heads":
                answer = [row.to_value() for row in replica.heads_in(argument[0], argument[1], wire.MAX_ROWS)]
            case "ranges":
                ranges = [
                    RangeRequest(author, first, min(last, first + MAX_RANGE - 1)) for author, first, last in argument
                ]
                answer = wire.fitting(await self._ranges(ranges))
            case "cuts":
                if argument + 1 < replica.cuts.lowest:
                    answer = wire.fitting(await self.service.store.cuts(argument, wire.MAX_CUTS, wire.ANSWER_BYTES))
                else:
                    answer = wire.fitting(cut.encode() for cut in replica.cuts[argument : argument + wire.MAX_CUTS])
            case "grants":
                terms = sorted(term for term in replica.grants if term > argument)
                grants = wire.fitting(replica.grants[term].encode() for term in terms)
                answer = list(zip(terms, grants, strict=False))
            case "checkpoint":
                newest_checkpoint = self.service.checkpoints.newest
                fresh = newest_checkpoint is not None and newest_checkpoint.checkpoint.size > argument
                answer = newest_checkpoint.encode() if newest_checkpoint is not None and fresh else None
            case _:
                authors = sorted(author for author in replica.forks if author > argument)
                forks = wire.fitting(replica.forks[author].encode() for author in authors)
                answer = list(zip(authors, forks, strict=False))
        data = codec.encode(answer)
        await self._pace(peer, len(data))
        return data

    async def _newest_of(self, peer: bytes, own: bytes | None) -> bytes | None:
        """The newest entry of ``peer`` that is held here, unless it is the one whose id the peer named itself."""
        replica = self.service.replica
        head = replica.heads.get(peer)
        if head is None or head.entry_id == own:
            return None
        entry = replica.entry(head.entry_id)
        held = await self.service.store.entries_by_id([head.entry_id]) if entry is None else [entry]
        return held[0].encode() if held else None

    async def _ranges(self, wanted: Sequence[RangeRequest]) -> list[bytes]:
        """The encoded entries of these ranges, from the disk what is not in memory, about as many as fit an answer."""
        replica = self.service.replica
        found: list[bytes] = []
        room = wire.ANSWER_BYTES
        for one in wanted:
            base = replica.base_for(one.author)
            data: list[bytes] = []
            if one.first_seq < base:
                below = RangeRequest(one.author, one.first_seq, min(one.last_seq, base - 1))
                data += await self.service.store.ranges([below], room)
                if len(data) < below.last_seq - below.first_seq + 1:
                    # Pruned, or no room: what lies above is of no use without it.
                    found += data
                    room -= sum(map(len, data))
                    if room <= 0:
                        break
                    continue
            data += [entry.encode() for entry in replica.entries(one.author, one.first_seq, one.last_seq)]
            found += data
            room -= sum(map(len, data))
            if room <= 0:
                break
        return found

    async def _pace(self, peer: bytes, size: int) -> None:
        """Make a peer wait that asks for more than its share."""
        now = trio.current_time()
        debt, since = self._debts.get(peer, (0.0, now))
        debt = max(0.0, debt - (now - since) * BYTES_PER_SECOND) + size
        self._debts[peer] = (debt, now)
        await trio.sleep(max(0.0, (debt - BURST) / BYTES_PER_SECOND))


def summary(service: LogService) -> Summary:
    """What this node says of its log in a hello."""
    replica = service.replica
    newest = replica.newest_cut
    height, cut = (0, None) if newest is None else (newest.cut.height, newest.cut.id)
    own = replica.heads.get(service.identity.node)
    return Summary(
        replica.heads_root(),
        height,
        cut,
        max(replica.grants, default=0),
        replica.side_digest(),
        None if own is None else own.entry_id,
    )


class _Session:
    """One round with one peer."""

    def __init__(self, sync: LogSync, peer: bytes) -> None:
        self._sync = sync
        self._service = sync.service
        self._peer = peer
        self.result = SyncResult()

    async def _ask(self, op: str, payload: bytes) -> Any:
        self.result.sent += len(payload)
        answer = await self._sync.ask(self._peer, payload)
        self.result.received += len(answer)
        return wire.parse_answer(op, answer)

    def _note(self, received: Received) -> int:
        self.result.added += received.added
        for error in received.errors:
            if len(self.result.errors) == MAX_BLAMES:
                raise PeerError("too many mistakes in one round")
            self.result.errors.append(error)
            self._sync.blame(self._peer, error)
        return received.added

    async def hello(self) -> Summary:
        """Exchange summaries; what the peer holds of our own feed is taken note of."""
        payload = wire.request("hello", summary(self._service).to_value())
        value, yours = await self._ask("hello", payload)
        if yours is not None:
            entry = entries.decode(yours)
            if entry.author != self._service.identity.node or entry.domain != self._service.domain.id:
                raise PeerError("hello: it shows another feed than the asker's")
            self._service.heard(entry)
        return Summary(*value)

    async def forks(self) -> None:
        """Fetch the fork proofs, in pages."""
        after = wire.FIRST
        while rows := await self._ask("forks", wire.request("forks", after)):
            if rows[-1][0] <= after:
                raise PeerError("forks: the authors do not ascend")
            after = rows[-1][0]
            self._note(await self._service.receive(forks=[data for _, data in rows], origin=self._peer))

    async def grants(self) -> None:
        """Fetch the grants, in pages."""
        after = 0
        while rows := await self._ask("grants", wire.request("grants", after)):
            if rows[-1][0] <= after:
                raise PeerError("grants: the terms do not ascend")
            after = rows[-1][0]
            self._note(await self._service.receive(grants=[data for _, data in rows], origin=self._peer))

    async def checkpoint(self) -> None:
        """Fetch a newer cosigned checkpoint, if the peer has one."""
        checkpoints = self._service.checkpoints
        data = await self._ask("checkpoint", wire.request("checkpoint", checkpoints.size))
        if data is not None:
            await checkpoints.take(data)

    async def cuts(self, goal: int) -> None:
        """Fetch the cuts above ours up to height ``goal`` and, page by page, the entries that they cover.

        Those that are made meanwhile are gossip's and the next round's: a slow link would run after them for ever.
        """
        replica = self._service.replica
        began = len(replica.cuts)
        missing: list[RangeRequest] = []
        while True:
            height = len(replica.cuts)
            data = await self._ask("cuts", wire.request("cuts", height))
            self._note(await self._service.receive(cuts=data, origin=self._peer))
            asked, again = None, False
            while len(replica.cuts) < goal:
                missing = self._service.intake.missing_for_cuts(again=again)
                # Another round may have brought it meanwhile: what counts is whether anything is missing that was not.
                if not missing or missing == asked:
                    if again:
                        break
                    asked, again = None, True
                    continue
                asked, reached = missing, len(replica.cuts)
                await self._fetch(missing)
                again = again and len(replica.cuts) == reached
            if len(replica.cuts) == height or len(replica.cuts) >= goal:
                break
        if len(replica.cuts) > began:
            self._sync.unserved.clear()
        elif missing and not self.result.errors:
            self._sync.unserved.add(self._peer)

    async def tails(self) -> None:
        """Fetch what no cut covers yet, by comparing buckets."""
        theirs = await self._ask("buckets", wire.request("buckets", None))
        ours = self._service.replica.bucket_digests()
        differing = [number for number in range(len(theirs)) if theirs[number] != ours[number]]
        after = wire.FIRST
        while differing:
            payload = wire.request("heads", [differing, after])
            rows = [Head.from_value(value) for value in await self._ask("heads", payload)]
            await self._heads(rows)
            if len(rows) < wire.MAX_ROWS or rows[-1].author <= after:
                return
            after = rows[-1].author

    async def _heads(self, rows: list[Head]) -> None:
        replica = self._service.replica
        searched: set[bytes] = set()
        # Where a peer is behind what is in memory here, the disk tells whether it is on another branch.
        low = [(row.author, row.seq) for row in rows if row.seq < replica.base_for(row.author) - 1]
        stored = await self._service.store.ids_at(low) if low else {}

        def id_at(author: bytes, seq: int) -> bytes | None:
            return replica.id_at(author, seq) or stored.get((author, seq))

        while True:
            wanted = plan(replica.heads, rows, id_at)
            wanted = [one for one in wanted if one.author not in searched]
            if not wanted:
                return
            before = {one.author: replica.next_for(one.author) for one in wanted}
            await self._fetch(wanted)
            for one in wanted:
                if replica.next_for(one.author) == before[one.author]:
                    searched.add(one.author)
                    if one.first_seq == before[one.author] > 0 and not replica.frozen(one.author):
                        # Nothing of it followed our head: perhaps the branches part below it.
                        first = max(replica.certified_head(one.author) + 1, one.first_seq - MAX_RANGE)
                        await self._fetch([RangeRequest(one.author, first, one.first_seq - 1)])

    async def _fetch(self, wanted: list[RangeRequest]) -> None:
        """Ask for ranges, a few requests at a time; raises the first error that one of them meets."""
        errors: list[Exception] = []

        async def ask(some: list[RangeRequest]) -> None:
            try:
                async with room:
                    if not errors:
                        data = await self._ask("ranges", wire.ranges(some))
                        self._note(await self._service.receive(entries=data, origin=self._peer))
            except (PeerError, Unreachable) as error:
                errors.append(error)

        room = trio.Semaphore(REQUESTS_AT_ONCE)
        async with trio.open_nursery() as nursery:
            for some in batches(wanted):
                nursery.start_soon(ask, some)
        if errors:
            raise errors[0]


def batches(wanted: Iterable[RangeRequest]) -> list[list[RangeRequest]]:
    """``wanted`` in as many parts as it takes requests."""
    found: list[list[RangeRequest]] = [[]]
    entries_asked = 0
    for one in wanted:
        length = one.last_seq - one.first_seq + 1
        if found[-1] and (len(found[-1]) == wire.MAX_RANGES or entries_asked + length > ENTRIES_AT_ONCE):
            found.append([])
            entries_asked = 0
        found[-1].append(one)
        entries_asked += length
    return found if found[0] else []
