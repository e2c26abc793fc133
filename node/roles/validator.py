"""The validator role: re-computes what it is due to audit and signs a verdict on each submission.

1. It fetches the whole submission before it judges, and serves it on. Several are fetched at once beside the judging,
   so that an author who stalls holds up nobody else.
2. What its author does not hand over within ``verdict_wait_ms`` is rejected softly, as missing. What was made with a
   version that nobody needs to keep any more is rejected softly, as late, without a look.
3. What cannot be judged for a reason that may lie here (its version does not arrive, a child fails on it twice) is
   undecidable: that blames nobody, and one submission does not keep all others from being judged.
4. Of a submission it replays the groups that its draw picks, as many as its author's standing asks for, and those that
   look like others' it has seen.
5. Replay, proofs and prompts are checked before any text is scored: scorers see only what sampling really gave.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import trio

from node.net.requests import Unreachable
from node.roles import auditing
from node.roles.engine_client import Engine
from node.roles.workbench import Workbench
from node.tasks.task_service import TaskService
from node.workers.child_process import WorkerError
from proofs import audit, checks, duplicates
from protocol import identity
from protocol.constants import MILLION
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.records import Rollout, Verdict
from protocol.work.rollout import Submission
from protocol.work.schedule import draw_message

GRACE = 0.2
"""Seconds for which the first in line may still be on its way before another is judged."""
RETRY = 0.5
"""Seconds after which a submission that nobody gave is asked for again."""
HOLD_TIMEOUT = 30.0
"""Seconds that one look waits for the version of a submission."""
FETCHES = 8
"""Submissions on their way or waiting to be judged: bounds memory."""
ATTEMPTS = 2
"""Times that a child may fail on a submission before it is given up."""


async def run(bench: Workbench) -> None:
    """Audit until cancelled."""
    node, engines = bench.node, bench.engines
    async with engines.open() as engine, engines.open_tasks() as tasks, trio.open_nursery() as nursery:
        fetches = _Fetches(bench, nursery)
        life = _Life(bench, engine, tasks, fetches)
        nursery.start_soon(fetches.wake_on_news)
        while True:
            # Those who earned trust first: a cheat that floods the network waits behind them.
            accounts = node.log.ledger.accounts()
            pending = node.log.ledger.pending_for(node.id)
            pending.sort(key=lambda entry: -accounts[entry.author].reputation)
            fetches.keep(pending)
            ready = [entry for entry in pending if fetches.ready(entry)]
            if ready and not fetches.about_to_arrive(pending[0]):
                await life.judge(ready[0])
            else:
                await fetches.wait(GRACE if ready else 0.5)


class _Fetches:
    """The submissions that arrived, and those on their way: at most ``FETCHES`` at once, in the order of ``keep``."""

    def __init__(self, bench: Workbench, nursery: trio.Nursery) -> None:
        self._bench = bench
        self._nursery = nursery
        self._running: dict[bytes, float] = {}
        self._arrived: dict[bytes, bytes | Unreachable | PeerError] = {}
        self._not_before: dict[bytes, float] = {}
        self._news = trio.Event()

    async def wake_on_news(self) -> None:
        """Let ``wait`` return when the log changes."""
        seen = 0
        while True:
            seen = await self._bench.node.log.wait_change(seen, timeout=60)
            self._news.set()

    async def wait(self, timeout: float) -> None:
        """Return when a submission arrived or the log changed, or after ``timeout`` seconds."""
        with trio.move_on_after(timeout):
            await self._news.wait()
        self._news = trio.Event()

    def keep(self, pending: list[Entry]) -> None:
        """Fetch what is pending and forget what is not."""
        wanted = {entry.id for entry in pending}
        self._arrived = {i: found for i, found in self._arrived.items() if i in wanted}
        self._not_before = {i: at for i, at in self._not_before.items() if i in wanted}
        now = trio.current_time()
        for entry in pending:
            if len(self._running) + len(self._arrived) >= FETCHES:
                return
            known = entry.id in self._running or entry.id in self._arrived
            if not known and now >= self._not_before.get(entry.id, now) and not self.needless(entry):
                self._running[entry.id] = now
                self._nursery.start_soon(self._fetch, entry)

    def needless(self, entry: Entry) -> bool:
        """Whether the verdict does not depend on the file."""
        assert isinstance(entry.payload, Rollout)
        return self._bench.weights.held.outdated(entry.payload.weights)

    def ready(self, entry: Entry) -> bool:
        """Whether the entry can be judged now."""
        return entry.id in self._arrived or self.needless(entry)

    def about_to_arrive(self, entry: Entry) -> bool:
        """Whether the file was asked for only just now."""
        return trio.current_time() < self._running.get(entry.id, -GRACE) + GRACE

    def take(self, entry: Entry) -> bytes:
        """The file that arrived. Raises ``Unreachable`` or ``PeerError`` where none did."""
        found = self._arrived.pop(entry.id)
        if isinstance(found, bytes):
            return found
        raise found

    async def _fetch(self, entry: Entry) -> None:
        rollout = entry.payload
        assert isinstance(rollout, Rollout)
        peers = [entry.author, *(peer for peer in self._bench.node.network.peers if peer != entry.author)]
        try:
            # The whole has as long as a verdict may wait: a peer that sends drop by drop holds a place no longer.
            with trio.fail_after(self._bench.node.domain.timings.verdict_wait_ms / 1000):
                found = await self._bench.blobs.fetch(rollout.submission, rollout.size, peers, timeout=10)
                self._arrived[entry.id] = found
        except (Unreachable, PeerError, trio.TooSlowError) as error:
            late = Unreachable("it arrives too slowly")
            self._arrived[entry.id] = late if isinstance(error, trio.TooSlowError) else error
            self._not_before[entry.id] = trio.current_time() + RETRY
        del self._running[entry.id]
        self._news.set()


@dataclass(slots=True)
class _Life:
    bench: Workbench
    engine: Engine
    tasks: TaskService
    fetches: _Fetches
    first_seen: dict[bytes, float] = field(default_factory=dict)
    index: duplicates.Index = field(default_factory=duplicates.Index)

    async def judge(self, entry: Entry) -> None:
        """Append a verdict on one ``rollout`` entry, or leave it for the next round while it can still arrive."""
        rollout = entry.payload
        assert isinstance(rollout, Rollout)
        draw = self.bench.node.identity.sign(identity.DRAW, draw_message(rollout.submission, entry.id))
        began = time.monotonic()
        result = await self._examine(entry, rollout, draw)
        if result is None:
            return
        self.bench.metrics.record(
            "verdict",
            version=self.bench.node.log.ledger.version_number(rollout.weights),
            outcome=result.outcome,
            severity=result.severity,
            reason=result.reason,
            deficit=result.score / MILLION,
            groups=rollout.groups,
            groups_replayed=result.audited,
            tokens=rollout.tokens,
            seconds=time.monotonic() - began,
        )
        self.first_seen.pop(entry.id, None)
        if result.outcome == "rejected":
            self.bench.node.logger.info("rejected a submission of %s: %s", entry.author.hex()[:8], result.words)
        await self.bench.node.log.append(
            Verdict(entry.id, result.outcome, result.severity, result.reason, result.score, draw, result.audited)
        )
        self.bench.failed_audits.pop(entry.id, None)

    async def _examine(self, entry: Entry, rollout: Rollout, draw: bytes) -> audit.AuditResult | None:
        """The verdict, or None where it is too early for one."""
        node, bench = self.bench.node, self.bench
        version = node.log.ledger.weights(rollout.weights)
        if version is None:
            return None
        if bench.weights.held.outdated(rollout.weights):
            return checks.result("late")
        first_seen = self.first_seen.setdefault(entry.id, trio.current_time())
        late = trio.current_time() > first_seen + node.domain.timings.verdict_wait_ms / 1000
        try:
            data = self.fetches.take(entry)
        except (Unreachable, PeerError) as error:
            if isinstance(error, PeerError):
                node.network.blame(entry.author, error)
            return checks.result("missing") if late else None
        try:
            await bench.weights.hold(version, timeout=HOLD_TIMEOUT)
            await self.engine.load(*bench.weights.held.paths(rollout.weights))
        except (Unreachable, PeerError, trio.TooSlowError) as error:
            node.logger.info("a version to audit with is not here: %s", error or "it took too long")
            return checks.result("undecidable") if late else None
        try:
            return await self._audit(entry, rollout, version, data, draw)
        except WorkerError as error:
            bench.failed_audits[entry.id] += 1
            if bench.failed_audits[entry.id] >= ATTEMPTS:
                node.logger.error("gave a submission of %s up: %s", entry.author.hex()[:8], error)
                return checks.result("undecidable")
            if error.gone:
                raise  # the children begin anew with the role
            return None

    async def _audit(
        self, entry: Entry, rollout: Rollout, version: Entry, data: bytes, draw: bytes
    ) -> audit.AuditResult:
        ledger, replica = self.bench.node.log.ledger, self.bench.node.log.replica
        case = auditing.Case(
            domain=self.bench.node.domain,
            author=entry.author,
            rollout=rollout,
            share=ledger.audited_share(entry),
            standing=ledger.standing(entry.author, rollout.weights),
            # Those in force at the cut that the version anchors on.
            thresholds=replica.thresholds_at(replica.height(version.anchor) or 0),
        )

        def alike(submission: Submission) -> Collection[int]:
            return {pair.group for pair in self.index.take(submission, entry.id)}

        found = await auditing.examine(case, data, draw, self.engine, self.tasks, alike)
        if found.reason == "malformed":
            self.bench.node.network.blame(entry.author, PeerError("a malformed submission"))
        return found
