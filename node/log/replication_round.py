"""One round of anti-entropy with one peer, the asking side; ``node.log.replication`` decides with whom, and answers.

1. Compare summaries; equal, done. Else fetch forks and grants, then cuts page by page with the entries that each page
   covers, then the tails that no cut covers yet, found by 256 bucket digests.
2. Everything is verified in order; a round asks on only as long as it brings something new.
3. A peer's mistake is its own: it is blamed and the round goes on, or ends where there are too many.
4. A round is not good where it brought a mistake, where the peer promised cuts and brought nothing, or answered slowly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Protocol

import trio

from node.log import replication_messages
from node.log.intake import Received
from node.log.replicated_log import LogService
from node.log.replication_messages import LogSummary
from node.net.requests import Unreachable
from protocol import codec
from protocol.errors import PeerError
from protocol.log import entry as entries
from protocol.log.heads import MAX_RANGE, Head, RangeRequest, bucket, plan

REQUEST_TIMEOUT: Final = 10.0

MAX_BLAMES: Final = 8
"""Mistakes of one round after which it is broken off."""

REQUESTS_AT_ONCE: Final = 3
"""Requests for entries that are under way together: while one answer is verified, the next ones come."""

FRUITLESS: Final = 3
"""Answers in a row without anything new to requests for entries after which a round asks for no more of those that the
peer listed: it might list heads for ever."""

SLOW_ANSWER: Final = 3.0
"""Seconds that answers may take on the average, where they bring less than one object a second."""

ENTRIES_AT_ONCE: Final = 1024
"""Entries that one request asks for: a third of what an answer has room for. They are few so that, while the loop takes
one answer, others are served, travel and are verified."""

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
        """Have gossip handed to ``handler(origin, data)``."""

    def blame(self, peer: bytes, error: PeerError) -> None:
        """Count a peer's mistake."""


@dataclass(slots=True)
class SyncResult:
    """One round with one peer: bytes of payload each way, objects taken, and mistakes of the peer. ``waited`` are the
    seconds that its ``asked`` requests took, ``broken`` whether it promised cuts that it did not bring."""

    sent: int = 0
    received: int = 0
    added: int = 0
    errors: list[PeerError] = field(default_factory=list)
    asked: int = 0
    waited: float = 0.0
    broken: bool = False

    @property
    def slow(self) -> bool:
        """Whether the peer's answers took long and brought little."""
        return self.waited > SLOW_ANSWER * self.asked and self.added < self.waited

    @property
    def good(self) -> bool:
        """Whether a round that came to its end was of use, or at least cost nothing."""
        return not (self.errors or self.slow or (self.broken and not self.added))


def summary(service: LogService) -> LogSummary:
    """What this node says of its log in a hello."""
    replica = service.replica
    newest = replica.newest_cut
    height, cut = (0, None) if newest is None else (newest.cut.height, newest.cut.id)
    own = replica.heads.get(service.identity.node)
    return LogSummary(
        replica.heads_root(),
        height,
        cut,
        max(replica.grants, default=0),
        replica.side_digest(),
        None if own is None else own.entry_id,
    )


class Session:
    """One round with ``peer``; ``result`` counts what it brings. ``unserved`` are the peers that know newer cuts and
    gave nothing of the entries that these cover; a round keeps it up to date."""

    def __init__(
        self,
        service: LogService,
        transport: Transport,
        protocol: str,
        unserved: set[bytes],
        peer: bytes,
        claimed: Callable[[bytes, int], None],
    ) -> None:
        self._service = service
        self._transport = transport
        self._protocol = protocol
        self._unserved = unserved
        self.peer = peer
        self._claimed = claimed
        self.result = SyncResult()
        self._fruitless = 0

    async def _ask(self, op: str, argument: codec.Value) -> Any:
        payload = replication_messages.request(op, argument)
        self.result.sent += len(payload)
        self.result.asked += 1
        began, most = trio.current_time(), replication_messages.MAX_ANSWER
        try:
            answer = await self._transport.request(
                self.peer, self._protocol, payload, timeout=REQUEST_TIMEOUT, max_response=most
            )
        finally:
            self.result.waited += trio.current_time() - began
        self.result.received += len(answer)
        return replication_messages.parse_answer(op, answer)

    def _note(self, received: Received) -> int:
        self.result.added += received.added
        for error in received.errors:
            if len(self.result.errors) == MAX_BLAMES:
                raise PeerError("too many mistakes in one round")
            self.result.errors.append(error)
            self._transport.blame(self.peer, error)
        return received.added

    async def hello(self) -> LogSummary:
        """Exchange summaries; what the peer holds of our own feed is taken note of."""
        value, yours = await self._ask("hello", summary(self._service).to_value())
        if yours is not None:
            entry = entries.decode(yours)
            if entry.author != self._service.identity.node or entry.domain != self._service.domain.id:
                raise PeerError("hello: it shows another feed than the asker's")
            self._service.on_own_entry(entry)
        return LogSummary(*value)

    async def sides(self) -> None:
        """Fetch the fork proofs and then the grants, in pages."""
        after: Any
        for op, places, after in (("forks", "authors", replication_messages.FIRST), ("grants", "terms", 0)):
            while rows := await self._ask(op, after):
                if rows[-1][0] <= after:
                    raise PeerError(f"{op}: the {places} do not ascend")
                after = rows[-1][0]
                objects = {op: [data for _, data in rows]}
                self._note(await self._service.intake.receive(**objects, origin=self.peer))

    async def checkpoint(self) -> None:
        """Fetch a newer cosigned checkpoint, if the peer has one."""
        checkpoints = self._service.checkpoints
        data = await self._ask("checkpoint", checkpoints.size)
        if data is not None:
            await checkpoints.take(data)

    async def cuts(self, goal: int) -> None:
        """Fetch the cuts above ours up to height ``goal`` and, page by page, the entries that they cover.

        Those that are made meanwhile are gossip's and the next round's: a slow link would run after them for ever.
        """
        replica = self._service.replica
        began, brought = len(replica.cuts), self.result.added
        missing: list[RangeRequest] = []
        while True:
            height = len(replica.cuts)
            data = await self._ask("cuts", height)
            self._note(await self._service.intake.receive(cuts=data, origin=self.peer))
            asked, again = None, False
            while len(replica.cuts) < goal:
                missing = self._service.intake.room.missing_for_cuts(again=again)
                # Another round may have brought it meanwhile: what counts is whether anything is missing that was not.
                if not missing or missing == asked:
                    if again:
                        break
                    asked, again = None, True
                    continue
                asked, reached = missing, len(replica.cuts)
                await (self._fetch(missing) if again else self._stream())
                again = again and len(replica.cuts) == reached
                self._claim(brought, goal)
            if len(replica.cuts) == height or len(replica.cuts) >= goal:
                break
        self.result.broken = len(replica.cuts) < goal
        if len(replica.cuts) > began:
            self._unserved.clear()
        elif missing and not self.result.errors:
            self._unserved.add(self.peer)

    def _claim(self, brought: int, goal: int) -> None:
        if self.result.added > brought:
            self._claimed(self.peer, goal)

    async def tails(self) -> None:
        """Fetch what no cut covers yet, by comparing buckets."""
        self._fruitless = 0
        theirs = await self._ask("buckets", None)
        ours = self._service.replica.bucket_digests()
        differing = [number for number in range(len(theirs)) if theirs[number] != ours[number]]
        after = replication_messages.FIRST
        while differing:
            rows = [Head.from_value(value) for value in await self._ask("heads", [differing, after])]
            authors = [after, *(row.author for row in rows)]
            if any(one >= other for one, other in pairwise(authors)) or not {*map(bucket, authors[1:])} <= {*differing}:
                raise PeerError("heads: they do not ascend, or nobody asked for them")
            await self._heads(rows)
            if len(rows) < replication_messages.MAX_ROWS or self._fruitless >= FRUITLESS:
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

    async def _stream(self) -> None:
        """Ask for what the waiting cuts lack, in their order, a few requests at a time and on and on as answers come,
        until nothing is left or something would be asked for again; raises the first error that a request meets."""
        errors: list[Exception] = []
        seen: set[tuple[bytes, int]] = set()
        under_way: dict[bytes, int] = {}
        requests = 0
        answered = trio.Event()

        async def ask(some: list[RangeRequest]) -> None:
            nonlocal requests
            await self._ask_ranges(some, errors)
            for one in some:
                if under_way.get(one.author) == one.last_seq:
                    del under_way[one.author]
            requests -= 1
            answered.set()

        async with trio.open_nursery() as nursery:
            while True:
                wanted: list[RangeRequest] = []
                if requests < REQUESTS_AT_ONCE and not errors:
                    wanted = self._service.intake.room.missing_for_cuts(asked=under_way, most=ENTRIES_AT_ONCE)
                some = batches(wanted)[0] if wanted else []
                places = {(one.author, one.first_seq) for one in some}
                if some and seen.isdisjoint(places):
                    seen |= places
                    under_way |= {one.author: one.last_seq for one in some}
                    requests += 1
                    nursery.start_soon(ask, some)
                elif requests:
                    answered = trio.Event()
                    await answered.wait()
                else:
                    break
        if errors:
            raise errors[0]

    async def _ask_ranges(self, some: list[RangeRequest], errors: list[Exception]) -> None:
        try:
            data = await self._ask("ranges", [[one.author, one.first_seq, one.last_seq] for one in some])
            received = await self._service.intake.receive(entries=data, origin=self.peer)
            self._note(received)
            self._fruitless = 0 if received.added or received.waiting else self._fruitless + 1
        except (PeerError, Unreachable, OSError) as error:
            errors.append(error)

    async def _fetch(self, wanted: list[RangeRequest]) -> None:
        """Ask for ranges, a few requests at a time; raises the first error that one of them meets."""
        errors: list[Exception] = []

        async def ask(some: list[RangeRequest]) -> None:
            async with room:
                if not errors and self._fruitless < FRUITLESS:
                    await self._ask_ranges(some, errors)

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
        if found[-1] and (
            len(found[-1]) == replication_messages.MAX_RANGES or entries_asked + length > ENTRIES_AT_ONCE
        ):
            found.append([])
            entries_asked = 0
        found[-1].append(one)
        entries_asked += length
    return found if found[0] else []
