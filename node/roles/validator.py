"""The validator role: re-computes what it is due to audit and signs a verdict on each submission.

1. It fetches the whole submission before it judges, and serves it on.
2. What its author does not hand over within ``verdict_wait_ms`` is rejected softly, as missing. What was made with a
   version that nobody needs to keep any more is rejected softly, as late, without a look.
3. What cannot be judged for a reason that may lie here (its version does not arrive, a child fails on it twice) is
   undecidable: that blames nobody, and one submission does not keep all others from being judged.
4. Replay, proofs and prompts are checked before any text is scored: scorers see only what sampling really gave.
"""

from __future__ import annotations

import trio

from node.context import Node
from node.net.rpc import Unreachable
from node.roles.engine import Engine, open_engine, open_tasks
from node.tasks.service import TaskService
from node.workers.client import WorkerError
from proofs import audit, checks
from protocol import identity, schedule
from protocol.constants import MAX_SUBMISSION_BYTES
from protocol.entry import Entry
from protocol.errors import PeerError
from protocol.records import Rollout, Verdict
from protocol.rollout import Submission, unpack

ROUND = 4
"""Submissions judged before the order is looked at anew."""
HOLD_TIMEOUT = 30.0
"""Seconds that one look waits for the version of a submission."""
ATTEMPTS = 2
"""Times that a child may fail on a submission before it is given up."""


async def run(node: Node) -> None:
    """Audit until cancelled."""
    async with open_engine(node) as engine, open_tasks(node) as tasks:
        life = _Life(node, engine, tasks)
        seen = 0
        while True:
            seen = await node.log.wait_change(seen, timeout=0.5)
            # Those who earned trust first: a cheat that floods the network waits behind them.
            accounts = node.log.ledger.accounts()
            pending = node.log.ledger.pending_for(node.id)
            for entry in sorted(pending, key=lambda e: -accounts[e.author].reputation)[:ROUND]:
                await life.judge(entry)


class _Life:
    def __init__(self, node: Node, engine: Engine, tasks: TaskService) -> None:
        self._node = node
        self._engine = engine
        self._tasks = tasks
        self._first_seen: dict[bytes, float] = {}

    async def judge(self, entry: Entry) -> None:
        """Append a verdict on one ``rollout`` entry, or leave it for the next round while it can still arrive."""
        rollout = entry.payload
        assert isinstance(rollout, Rollout)
        draw = self._node.identity.sign(identity.DRAW, rollout.submission)
        result = await self._examine(entry, rollout, draw)
        if result is None:
            return
        self._first_seen.pop(entry.id, None)
        if result.outcome == "rejected":
            self._node.logger.info("rejected a submission of %s: %s", entry.author.hex()[:8], result.words)
        await self._node.log.append(
            Verdict(entry.id, result.outcome, result.severity, result.reason, result.score, draw, result.audited)
        )
        self._node.failed_audits.pop(entry.id, None)

    async def _examine(self, entry: Entry, rollout: Rollout, draw: bytes) -> audit.AuditResult | None:
        """The verdict, or None where it is too early for one."""
        node = self._node
        version = node.log.ledger.weights(rollout.weights)
        if version is None:
            return None
        if node.weights.outdated(rollout.weights):
            return checks.result("late")
        first_seen = self._first_seen.setdefault(entry.id, trio.current_time())
        late = trio.current_time() > first_seen + node.domain.timings.verdict_wait_ms / 1000
        try:
            data = await self._fetch(entry, rollout)
        except (Unreachable, PeerError) as error:
            if isinstance(error, PeerError):
                node.network.blame(entry.author, error)
            return checks.result("missing") if late else None
        try:
            await node.weights.hold(version, timeout=HOLD_TIMEOUT)
            await self._engine.load(rollout.weights)
        except (Unreachable, PeerError, trio.TooSlowError) as error:
            node.logger.info("a version to audit with is not here: %s", error or "it took too long")
            return checks.result("undecidable") if late else None
        try:
            return await self._audit(entry, rollout, data, draw)
        except WorkerError as error:
            node.failed_audits[entry.id] += 1
            if node.failed_audits[entry.id] >= ATTEMPTS:
                node.logger.error("gave a submission of %s up: %s", entry.author.hex()[:8], error)
                return checks.result("undecidable")
            if error.gone:
                raise  # the children begin anew with the role
            return None

    async def _fetch(self, entry: Entry, rollout: Rollout) -> bytes:
        if rollout.size > MAX_SUBMISSION_BYTES:
            raise PeerError("a submission of an absurd size")
        peers = [entry.author, *(p for p in self._node.network.peers if p != entry.author)]
        return await self._node.fetch_blob(rollout.submission, rollout.size, peers, timeout=10)

    async def _audit(self, entry: Entry, rollout: Rollout, data: bytes, draw: bytes) -> audit.AuditResult:
        domain = self._node.domain
        try:
            submission = Submission.parse(data, domain.recipe)
        except PeerError as error:
            self._node.network.blame(entry.author, error)
            return checks.result("malformed")
        if not checks.header_matches(submission, domain.id, entry.author, rollout):
            return checks.result("wrong-header")
        picked = schedule.audited_groups(draw, len(submission.groups), domain.policy.audit_share)
        seeds = {
            i: schedule.seed(domain.id, rollout.weights, entry.author, submission.groups[i].counter) for i in picked
        }
        items = {i: schedule.choose_task(seeds[i], [t.weight for t in domain.tasks]) for i in picked}
        questions = await self._tasks.questions(list(items.values()))
        prompts = dict(zip(picked, map(unpack, await self._engine.encode(questions)), strict=True))
        before = audit.inspect(submission, prompts, domain.recipe, self._engine.end_token, self._engine.vocabulary)
        if before.outcome != "accepted":
            return before
        replay = await self._engine.replay([(seeds[i], submission.groups[i]) for i in picked])
        replays = {i: checks.GroupReplay(*row) for i, row in zip(picked, replay["groups"], strict=True)}
        before = audit.audit_replay(submission, replays, domain.thresholds)
        if before.outcome != "accepted":
            return before
        texts = dict(zip(picked, replay["texts"], strict=True))
        flat = [(*items[i], text) for i in picked for text in texts[i]]
        claimed = [response.reward for i in picked for response in submission.groups[i].responses]
        scores = iter(await self._score(flat, claimed))
        rewards = {i: tuple(next(scores) for _ in texts[i]) for i in picked}
        return audit.audit_rewards(submission, rewards, before)

    async def _score(self, flat: list[tuple[int, int, str]], claimed: list[int]) -> list[int | None]:
        """The rewards; a claim is called false only after it was tried again with more patience. One is enough."""
        rewards = await self._tasks.score(flat)
        for place, (item, claim) in enumerate(zip(flat, claimed, strict=True)):
            if rewards[place] != claim:
                (rewards[place],) = await self._tasks.confirm([item], [claim])
                if rewards[place] not in (None, claim):
                    break
        return rewards
