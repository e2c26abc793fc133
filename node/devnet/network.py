"""A whole network on one machine: real daemons, real sockets, one folder.

1. Preparation writes a data directory a node (key, ``farflung.toml`` with a port of its own) and gives node 1 the
   signed genesis. From then on the devnet only starts processes, asks their control sockets and shows the answers:
   nothing that a node decides is decided here.
2. Every node stops at step ``steps`` by its configuration. The run has converged once no node generates, no audit is
   pending, everything is covered by the newest cut, and all heads roots are equal.
3. However it ends (done, Ctrl-C, a mistake), all processes are ended within a bounded time, and ``summary.json`` and
   ``report.html`` are written from a node's own log.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import trio

from node.api.control_client import Unavailable
from node.config import write
from node.devnet import fleet, report
from node.devnet.fleet import PACE, Member, Pace
from node.devnet.live_display import Display, NodeView, View, human_time
from node.devnet.report import Story, TrafficSample
from node.devnet.setup import Options, make_folder, prepare
from node.devnet.summary import EMPTY, RunSummary, StepRow, evaluation_rows, of_ledger, timed
from node.domain import domain_toml, founding
from node.domain.domain_toml import EARNED_REPUTATION, Founding, new_policy
from node.errors import UserError, innermost
from node.log.offline_verification import verify
from node.roles.engine_client import chosen, vllm_installed
from node.store.data_directory import DataDirectory
from node.store.durable_files import write_atomic
from protocol.credit.ledger import Ledger

ELECTORS: Final = 4
"""Nodes 1 to 4 are the electors: any three of them make cuts, so one may fail."""
GRACE: Final = 10.0
GRACE_INTERRUPTED: Final = 1.5
SAMPLE_EVERY: Final = 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds for a daemon to answer for the first time (loading its libraries takes some on a busy machine), for the
    last audits, for all to agree, and without a step until the display says so."""

    start: float = 120.0
    audit: float = 60.0
    agree: float = 30.0
    stall: float = 120.0


PATIENCE: Final = Patience()
Check = Callable[[Founding], Awaitable[object]]
Found = Callable[[DataDirectory, Founding], Awaitable[object]]


@dataclass(slots=True)
class _Devnet:
    options: Options
    founding: Founding
    display: Display
    members: list[Member]
    found: Found
    patience: Patience
    began: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    samples: list[TrafficSample] = field(default_factory=list)
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What any node told of a version, by its number."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    interrupted: bool = False
    failure: BaseException | None = None
    """The ``UserError`` that ended the run."""
    converged: bool = False
    summary: RunSummary | None = None

    # The run

    async def run(self, others: set[int]) -> int:
        async with trio.open_nursery() as nursery:
            # The watch outlives the run, so that a second Ctrl-C cannot break off the orderly end.
            nursery.start_soon(self._watch_signals)
            try:
                with self.scope:
                    await self._live()
            except* UserError as group:
                self.failure = innermost(group)
            finally:
                with trio.CancelScope(shield=True):
                    await self._end(others)
            nursery.cancel_scope.cancel()
        if self.failure is not None:
            raise self.failure
        return 130 if self.interrupted else 0 if self.converged else 1

    async def _live(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._show)
            founder, *followers = self.members
            self.display.say(f"run folder {self.options.folder}")
            # Named, so that no stranger who joins can make itself a validator and judge its own work.
            honest = [m.directory.read_identity().node for m in self.members[: self.options.nodes]]
            ours = replace(
                self.founding, validators=tuple(honest), electors=tuple(honest[:ELECTORS]), trainers=tuple(honest)
            )
            await self.found(founder.directory, ours)
            nursery.start_soon(fleet.keep_reaping, self.members)  # from now on all other children are orphans
            await self._start(nursery, [founder])
            # The others are told its address only, and ask it for the genesis: it must answer by then.
            await self._start(nursery, followers)
            self.phase = "forming"
            await self._train()
            self.phase = "finishing"
            self.converged = await self._converge()
            self.phase = "done" if self.converged else "not converged"
            await self._write()
            if self.options.keep_running and self.converged:
                await self._go_on()
            nursery.cancel_scope.cancel()

    async def _start(self, nursery: trio.Nursery, members: list[Member]) -> None:
        for member in members:
            nursery.start_soon(member.keep_running, self.display.say)
            nursery.start_soon(member.keep_polling)
        if await self._until(lambda: all(member.status for member in members), self.patience.start):
            return
        late = next(member for member in members if not member.status)
        raise UserError(
            f"{late.name} did not answer within {self.patience.start:.0f} s ({late.last_line()})", f"see {late.log}"
        )

    async def _train(self) -> None:
        step, since, stalled = 0, trio.current_time(), False
        while (now := self._step()) < self.options.steps:
            if any(member.status.get("version", -1) >= 0 for member in self.members):
                self.phase = "training"
            if now > step:
                step, since, stalled = now, trio.current_time(), False
            elif trio.current_time() > since + self.patience.stall and not stalled:
                stalled = True
                waited = f"{self.patience.stall:.0f} s"
                self.display.say(f"no step for {waited}; what the nodes say stands in their daemon.log")
            await trio.sleep(0.1)

    async def _converge(self) -> bool:
        if not await self._until(self._quiet, self.patience.audit):
            self.display.say(f"audits are still pending after {self.patience.audit:.0f} s")
        if await self._until(lambda: self._quiet() and self._agree(), self.patience.agree):
            root = self.members[0].status["heads_root"]
            self.display.say(f"all {len(self.members)} nodes hold the same log: heads root {root}")
            return True
        roots = ", ".join(f"{m.name} {m.status.get('heads_root', '?')[:8]}" for m in self.members)
        self.display.say(f"the nodes did not agree within {self.patience.agree:.0f} s: {roots}")
        return False

    async def _until(self, condition: Callable[[], bool], timeout: float) -> bool:
        with trio.move_on_after(timeout) as scope:
            while not condition():  # noqa: ASYNC110  # the state of other processes: no event tells of it
                await trio.sleep(0.1)
        return not scope.cancelled_caught

    def _quiet(self) -> bool:
        """No node generates, none has an audit to make or a version to evaluate."""
        busy = ("generating", "pending_audits", "evaluating")
        return all(m.fresh() and not any(m.status[what] for what in busy) for m in self.members)

    def _agree(self) -> bool:
        """All hold the same entries and every one of them is final."""
        roots = {member.status["heads_root"] for member in self.members}
        return len(roots) == 1 and all(member.status["final"] for member in self.members)

    async def _go_on(self) -> None:
        self.phase = "running on; Ctrl-C ends it"
        for member in self.members:
            # The configuration as well, so that a restarted node does not stop where the others went on.
            config = member.directory.config()
            going_on = replace(config, devnet=replace(config.devnet, pause_at_step=0))
            write(going_on, member.directory.config_file)
            try:
                await member.ask("pause_at", step=0)
            except Unavailable as error:
                self.display.say(str(error))
        await trio.sleep_forever()

    # The end

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async for _ in signals:
                self.interrupted = True
                self.scope.cancel()

    async def _end(self, others: set[int]) -> None:
        if self.interrupted or self.failure is not None:
            self.phase = "interrupted" if self.interrupted else "failed"
        self._draw()
        killed = await fleet.stop(self.members, grace=GRACE_INTERRUPTED if self.interrupted else GRACE, others=others)
        for name in killed:
            self.display.say(f"{name} did not stop in time and was killed")
        if self.summary is None or self.interrupted:
            await self._write(signatures=not self.interrupted)
        self._draw()
        self._show_result()

    async def _write(self, *, signatures: bool = True) -> None:
        """Write ``summary.json`` and ``report.html`` from the first node's log that can be read."""
        seconds = time.monotonic() - self.began
        found, problem = await trio.to_thread.run_sync(_read_log, self.members, signatures)
        if problem is not None:
            self.display.say(problem)
        self.summary = timed(found, seconds, self._bytes(), evaluation_rows(self.evaluations.values()))
        status = next((member.status for member in self.members if member.status), {})
        roots = sorted({member.status["heads_root"] for member in self.members if member.status})
        facts = (
            ("domain", str(status.get("domain", "–"))),
            ("heads root", roots[0] if len(roots) == 1 else f"{len(roots)} different ones" if roots else "–"),
            ("cuts", str(status.get("cut_height", 0))),
            ("folder", str(self.options.folder)),
        )
        story = Story(self.summary, tuple(self.samples), self.options.steps, self.phase, facts)
        try:
            write_atomic(self.options.folder / "summary.json", self.summary.to_json().encode())
            write_atomic(self.options.folder / "report.html", report.render(story).encode())
        except OSError as error:
            self.display.say(f"{self.options.folder}: the summary cannot be written ({error.strerror})")

    def _show_result(self) -> None:
        assert self.summary is not None
        both = report.means([row.reward for row in self.summary.steps])
        if both is not None:
            count, took = len(self.summary.steps), human_time(self.summary.seconds)
            self.display.conclude(
                f"{count} steps in {took}; mean reward of the first {report.WINDOW} steps {both[0]:.3f}, "
                f"of the last {report.WINDOW} {both[1]:.3f}"
            )
        for name in ("report.html", "summary.json"):
            self.display.conclude(str(self.options.folder / name))

    # The picture

    async def _show(self) -> None:
        sampled = -SAMPLE_EVERY
        while True:
            now = time.monotonic() - self.began
            if now >= sampled + SAMPLE_EVERY:
                self.samples.append(TrafficSample(now, sum(m.tokens.value for m in self.members), self._bytes()))
                sampled = now
            for member in self.members:
                self.evaluations |= {found["version"]: found for found in member.status.get("evaluations", ())}
            self._draw()
            await trio.sleep(self.members[0].pace.poll)

    def _draw(self) -> None:
        newest: dict[str, Any] = max((m.status for m in self.members), key=lambda s: s.get("step", -1))
        view = View(
            goal=self.options.steps,
            phase=self.phase,
            seconds=time.monotonic() - self.began,
            bytes=self._bytes(),
            steps=tuple(StepRow.of(step) for step in newest.get("steps", ())),
            nodes=tuple(_node(member, newest) for member in self.members),
            cut_height=newest.get("cut_height", 0),
            address=self.members[0].address,
        )
        self.display.update(view)

    def _step(self) -> int:
        return max((member.status.get("step", 0) for member in self.members), default=0)

    def _bytes(self) -> int:
        # What one node sends another receives: each byte counts once, at its sender.
        return sum(member.sent.value for member in self.members)


def _read_log(members: list[Member], signatures: bool) -> tuple[RunSummary, str | None]:
    """The summary from the first log that can be read, and what is wrong with that log; an empty one without any."""
    for member in members:
        try:
            checked = verify(member.directory, signatures=signatures)
        except UserError:
            continue
        problem = f"{member.name}: the log is not valid: {checked.problems[0]}" if checked.problems else None
        return of_ledger(Ledger(checked.replica), [m.name for m in members]), problem
    return EMPTY, None


def _node(member: Member, newest: dict[str, Any]) -> NodeView:
    status = member.status
    return NodeView(
        name=member.name,
        state=member.state,
        role=status.get("role", "none"),
        version=status.get("version", -1),
        credit=newest.get("credit", {}).get(status.get("node", ""), 0),
        peers=status.get("peers", 0),
        tokens=member.tokens.value,
        sent=member.sent.value,
        received=member.received.value,
        warnings=tuple(status.get("health", ())),
    )


async def run(
    options: Options,
    open_display: Callable[[], Display],
    *,
    command: Callable[[DataDirectory], list[str]] = fleet.daemon_command,
    check: Check = founding.check,
    found: Found = founding.found,
    pace: Pace = PACE,
    patience: Patience = PATIENCE,
) -> int:
    """Run a devnet of daemons that ``command`` starts: 0 converged, 1 not converged, 130 interrupted.

    Raises ``UserError``.
    """
    options.check()
    nodes = options.nodes + len(options.cheats)
    if options.domain is None:
        asked = founding.devnet(name="devnet", nodes=nodes, tasks=options.tasks)
    else:
        # Its own nodes are electors and validators, whatever the file says: see ``_live``.
        policy = new_policy(nodes, EARNED_REPUTATION)
        asked = replace(domain_toml.load(options.domain), devnet=True, policy=policy)
    chosen(options.engine, 0, installed=vllm_installed())
    await check(asked)
    # From here on there is a folder; what is wrong with the command line is told before that.
    make_folder(options.folder)
    others = fleet.adopt_orphans()
    members = prepare(options, command, pace)
    display = open_display()
    try:
        return await _Devnet(options, asked, display, members, found, patience).run(others)
    finally:
        display.close()
