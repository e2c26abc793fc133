"""Replication: gossip carries what is new, anti-entropy guarantees that everything arrives.

1. Own entries, cuts and grants are gossiped once they are stored. Gossip is a hint: it may be lost or out of order.
2. Anti-entropy compares logs with one peer after the other (``node.log.replication_round`` is one round), in the order
   of ``node.log.round_order``. A peer that stalls or makes mistakes disturbs nobody else's round, and falls behind.
3. Every answer is bounded, every request has a deadline, and a peer that asks for more than its share waits.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import trio

from node.log import replication_messages
from node.log.replicated_log import LogNews, LogService
from node.log.replication_messages import ANSWER_BYTES, MAX_CUTS, MAX_ROWS, LogSummary, News, fitting
from node.log.replication_round import Session, SyncResult, Transport, summary
from node.log.round_order import Rank, RoundOrder
from node.net.requests import Refused, Unreachable
from protocol import codec
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import MAX_RANGE, RangeRequest
from protocol.log.quorum import CertifiedCut, CertifiedGrant

logger = logging.getLogger(__name__)

Place = TypeVar("Place", int, bytes)

TOPIC: Final = "log"
ROUND_TIMEOUT: Final = 120.0
"""A round that takes longer is broken off; what it brought stays."""

PATIENCE: Final = 3.0
"""After so many seconds of a round the next peer's begins beside it; half as many for each fault of the peer."""

BYTES_PER_SECOND: Final = 32 << 20
BURST: Final = 64 << 20
"""What one peer gets: so many bytes at once, and then so many a second."""

QUEUE: Final = 1024
"""Own news that wait to be gossiped; beyond that they travel by anti-entropy alone."""


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
        self._order = RoundOrder()
        # The height that each connected peer says it holds, of those that kept such a promise lately.
        self._claims: dict[bytes, int] = {}
        self._catching_up = trio.Lock()
        # What each peer was sent lately, less what time has paid off: (bytes, when).
        self._debts: dict[bytes, tuple[float, float]] = {}
        self._outgoing, self._news = trio.open_memory_channel[LogNews](QUEUE)

    def soon(self, peer: bytes) -> None:
        """Compare logs with ``peer`` soon: it is asked for."""
        self._order.want(peer)
        self._wake()

    def _wake(self) -> None:
        # Not for one that must wait all the same, or its asking would drive rounds with all others.
        if self._order.pressing(self._ranks()):
            self._soon.set()

    def serve(self) -> None:
        """Answer peers, and take in what they gossip."""
        self.service.subscribe(self._enqueue)
        self.transport.serve(self.protocol, self.handle, max_request=replication_messages.MAX_REQUEST)
        self.transport.subscribe(TOPIC, self.on_gossip)

    async def run(self) -> None:
        """Gossip and compare, for ever; begun again where it failed."""
        self._order.restart()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._publish)
            await self._compare()

    # Gossip

    def _enqueue(self, news: LogNews) -> None:
        # Fork proofs are worth telling whoever found them; the rest is its maker's to tell.
        forks = news.of(ForkProof)
        if news.own or forks:
            try:
                self._outgoing.send_nowait(news if news.own else LogNews(tuple(forks)))
            except trio.WouldBlock:
                logger.debug("gossip cannot keep up with the own log")

    async def _publish(self) -> None:
        async for news in self._news:
            kinds = (Entry, CertifiedCut, CertifiedGrant, ForkProof)
            parts = ([item.encode() for item in news.items if isinstance(item, kind)] for kind in kinds)
            data = News(*parts).encode()
            if data is not None:
                await self.transport.publish(TOPIC, data)

    async def on_gossip(self, origin: bytes, data: bytes) -> None:
        """Take a gossip message. Raises ``PeerError`` where it holds something bad (the good parts are taken)."""
        news = News.parse(data)
        received = await self.service.intake.receive(
            entries=news.entries, cuts=news.cuts, grants=news.grants, forks=news.forks, origin=origin
        )
        if received.waiting:
            self.soon(origin)
        if received.errors:
            raise received.errors[0]

    # Comparing

    async def _compare(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                peer = self._order.begin(self._ranks())
                if peer is not None:
                    done = trio.Event()
                    nursery.start_soon(self._round, peer, done)
                    # A peer that stalls keeps its own round waiting, not the others.
                    with trio.move_on_after(PATIENCE / 2 ** self._order.faults(peer)):
                        await done.wait()
                    # However often peers ask for it, comparing leaves the daemon time for everything else.
                    await trio.sleep(self._interval / 20)
                if peer is None or not self._order.pressing(self._ranks()):
                    self._soon = trio.Event()
                    with trio.move_on_after(self._interval):
                        await self._soon.wait()

    def _ranks(self) -> dict[bytes, Rank]:
        """The connected peers. What is held of others that are gone is forgotten."""
        connected = set(self.transport.peers)
        self.unserved &= connected
        self._debts = {peer: debt for peer, debt in self._debts.items() if peer in connected}
        self._unclaim(self._claims.keys() - connected)
        replica = self.service.replica
        electors = {*replica.electors_at(len(replica.cuts) + 1)}
        return {
            peer: Rank.ELECTOR if peer in electors else Rank.MEMBER if self._is_member(peer) else Rank.STRANGER
            for peer in sorted(connected)
        }

    def _is_member(self, peer: bytes) -> bool:
        return self.service.ledger.member(peer)

    async def _round(self, peer: bytes, done: trio.Event) -> None:
        session = self._session(peer)
        good: bool | None = False
        try:
            with trio.fail_after(ROUND_TIMEOUT):
                await self._compare_with(session)
            good = session.result.good
        except PeerError as error:
            self.transport.blame(peer, error)
        except trio.TooSlowError as error:
            good = session.result.added >= ROUND_TIMEOUT
            logger.debug("comparing logs with %s: %s", peer.hex()[:8], error)
        except (Unreachable, OSError) as error:
            # Of what the disk refuses the store tells. Neither that nor a quick refusal is held against the peer.
            if isinstance(error, OSError) or (isinstance(error, Refused) and not session.result.slow):
                good = None
            logger.debug("comparing logs with %s: %s", peer.hex()[:8], error)
        finally:
            self.rounds += 1
            self._order.end(peer, good)
            if good is False:
                self._unclaim({peer})
            self._wake()
            done.set()

    def _session(self, peer: bytes) -> Session:
        return Session(self.service, self.transport, self.protocol, self.unserved, peer, self.claimed)

    async def sync_with(self, peer: bytes) -> SyncResult:
        """One round of anti-entropy with ``peer``. Bad objects are blamed and skipped; raises ``PeerError`` where the
        peer breaks the protocol itself, ``Unreachable`` where it does not answer, ``OSError`` where the disk fails."""
        session = self._session(peer)
        await self._compare_with(session)
        return session.result

    async def _compare_with(self, session: Session) -> None:
        theirs = await session.hello()
        ours = summary(self.service)
        if not theirs.agrees(ours):
            if theirs.side != ours.side:
                await session.sides()
            if theirs.height > ours.height:
                async with self._turn():
                    await session.cuts(theirs.height)
            if theirs.heads_root != self.service.replica.heads_root():
                await session.tails()
        if self.service.checkpoints.lacking:
            await session.checkpoint()
        self.service.on_own_head(session.peer)
        if theirs.height <= len(self.service.replica.cuts):
            self.service.on_level(session.peer)

    def claimed(self, peer: bytes, height: int) -> None:
        """``peer`` says that it holds the cut of ``height``, and brought some on the way to it."""
        self._claims[peer] = height
        self.service.height_claimed = max(self._claims.values())

    def _unclaim(self, peers: set[bytes]) -> None:
        if peers & self._claims.keys():
            self._claims = {peer: height for peer, height in self._claims.items() if peer not in peers}
            self.service.height_claimed = max(self._claims.values(), default=0)

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

    # Answering

    async def handle(self, peer: bytes, data: bytes) -> bytes:
        """Answer one request. Raises ``PeerError`` for a malformed one, ``Refused`` where the disk fails."""
        op, argument = replication_messages.parse_request(data)
        try:
            answer = codec.encode(await self._answer(peer, op, argument))
        except OSError:
            # Of that the store tells.
            raise Refused("its disk fails") from None
        await self._pace(peer, len(answer))
        return answer

    async def _answer(self, peer: bytes, op: str, argument: Any) -> Any:
        replica = self.service.replica
        match op:
            case "hello":
                theirs = LogSummary(*argument)
                mine = summary(self.service)
                if theirs.height > mine.height or theirs.term > mine.term:
                    self.soon(peer)
                return [mine.to_value(), await self._newest_of(peer, theirs.own)]
            case "buckets":
                return replica.bucket_digests()
            case "heads":
                return [row.to_value() for row in replica.heads_in(argument[0], argument[1], MAX_ROWS)]
            case "ranges":
                ranges = [
                    RangeRequest(author, first, min(last, first + MAX_RANGE - 1)) for author, first, last in argument
                ]
                return fitting(await self._ranges(ranges))
            case "cuts":
                if argument + 1 < replica.cuts.lowest:
                    return fitting(await self.service.store.cuts(argument, MAX_CUTS, ANSWER_BYTES))
                return fitting(cut.encode() for cut in replica.cuts[argument : argument + MAX_CUTS])
            case "grants":
                return _listed(replica.grants, argument)
            case "checkpoint":
                newest = self.service.checkpoints.newest
                return newest.encode() if newest is not None and newest.checkpoint.size > argument else None
            case _:
                return _listed(replica.forks, argument)

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
        bases = [replica.base_for(one.author) for one in wanted]
        # All of memory is looked up now: while the disk is read, what is final may leave it.
        held = [replica.entries(one.author, one.first_seq, one.last_seq) for one in wanted]
        below = [
            RangeRequest(one.author, one.first_seq, min(one.last_seq, base - 1))
            for one, base in zip(wanted, bases, strict=True)
            if one.first_seq < base
        ]
        stored = iter(await self.service.store.ranges(below, ANSWER_BYTES) if below else ())
        found: list[bytes] = []
        room = ANSWER_BYTES
        for one, base, above in zip(wanted, bases, held, strict=True):
            data = list(next(stored)) if one.first_seq < base else []
            # Where something is pruned, or found no room, what lies above is of no use.
            if len(data) >= min(one.last_seq + 1, base) - one.first_seq:
                data += [entry.encode() for entry in above]
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


def _listed(
    objects: Mapping[Place, CertifiedGrant] | Mapping[Place, ForkProof], after: Place
) -> list[tuple[Place, bytes]]:
    """The objects at the places behind ``after``, ascending and encoded, what fits an answer."""
    places = sorted(place for place in objects if place > after)
    return list(zip(places, fitting(objects[place].encode() for place in places), strict=False))
