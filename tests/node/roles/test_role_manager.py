"""Taking up, changing and restarting roles; and whole networks of nodes that train."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing

from node.config import WILLING
from node.daemon import ROLES
from node.errors import UserError
from node.roles import role_manager
from node.workers.child_process import WorkerError
from protocol.errors import LocalError
from protocol.records import Role, Step
from tests.node.fake_children import Faults
from tests.node.fakes import Cluster, Running, open_cluster
from tests.simulator import Network

FIVE = ("elector", "a", "b", "c", "d")


def role_entries(running: Running) -> list[str]:
    entries = running.node.log.replica.entries(running.id)
    return [entry.payload.role for entry in entries if isinstance(entry.payload, Role)]


def entries(running: Running) -> int:
    return len(running.node.log.replica.arrivals)


async def trained(cluster: Cluster, steps: int, seconds: float = 60) -> None:
    await cluster.until(lambda: all(running.steps >= steps for running in cluster.running.values()), seconds)


async def test_five_nodes_take_the_four_roles_train_and_end(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        for name in FIVE:
            await cluster.start(name, pause_at_step=5)
        await trained(cluster, 5)
        nodes = list(cluster.running.values())
        assert Counter(r.own.role for r in nodes) == Counter(
            ("trainer", "validator", "relay", "inference", "inference")
        )
        await cluster.until(lambda: not any(r.own.generating or r.node.log.ledger.outstanding() for r in nodes))
        await trio.sleep(2)
        await cluster.agree()
        assert all(r.node.log.replica.uncovered() == [] for r in nodes)
        before = [entries(r) for r in nodes]
        await trio.sleep(30)
        assert [entries(r) for r in nodes] == before
        # One decision each, and no second thoughts; each torch child was started once.
        assert all(role_entries(r) == [r.own.role] for r in nodes)
        assert faults.count("engine", "start") == 3
        assert faults.count("trainer", "start") == 1
        assert all(r.node.health.warnings == {} for r in nodes)
        assert all(r.port.blamed == [] for r in nodes)
        numbers = [s.payload.number for s in nodes[0].node.log.ledger.steps() if isinstance(s.payload, Step)]
        assert numbers == [1, 2, 3, 4, 5]


async def test_a_lossy_network_trains_as_well(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults, network=Network(3, loss=0.05, delay=0.2)) as cluster:
        for name in FIVE:
            await cluster.start(name, pause_at_step=2)
        await trained(cluster, 2, 300)


@pytest.mark.parametrize("role", ["trainer", "relay", "inference", "validator"])
async def test_a_node_that_is_gone_for_good_is_replaced(
    role: str, tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.start("elector", willing=("inference",))
        for name in ("a", "b", "c", "d"):
            await cluster.start(name, pause_at_step=12)
        await trained(cluster, 2)
        gone = next(name for name, r in cluster.running.items() if r.own.role == role and name != "elector")
        # Bytes that nobody else has yet would be lost with it, and the version's number with them.
        newest = cluster.running[gone].node.log.ledger.newest_weights
        others = [r.weights.held for name, r in cluster.running.items() if name != gone]
        await cluster.until(lambda: any(newest() == held.newest_held() for held in others))
        cluster.crash(gone)
        await trained(cluster, 8, 100)
        taken = Counter(r.own.role for r in cluster.running.values())
        assert taken["trainer"] == taken["validator"] == 1
        ledger = cluster.running["elector"].node.log.ledger
        grant = ledger.grant()
        assert grant is not None
        assert grant.term == (2 if role == "trainer" else 1)


async def test_a_validator_that_comes_back_too_late_holds_nothing_up(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        for name in FIVE:
            await cluster.start(name, willing=("inference",) if name == "elector" else WILLING, pause_at_step=8)
        await trained(cluster, 2)
        name = cluster.role("validator")
        gone = cluster.crash(name)
        await cluster.until(lambda: any(r.own.role == "validator" for r in cluster.running.values()))
        await cluster.start(name, disk=gone.disk, known=[cluster.running["elector"].id], pause_at_step=8)
        await trained(cluster, 8, 100)
        await trio.sleep(5)
        await cluster.agree()
        # Exactly as many steps as were asked for, although weights were announced twice for one of them.
        assert {r.steps for r in cluster.running.values()} == {8}
        running = cluster.running["elector"]
        ledger, presences = running.node.log.ledger, running.presences
        assert not any(presences.can_decide(ledger.due(entry)) for entry in ledger.outstanding())


async def test_a_restarted_node_goes_on_with_its_role(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        for name in FIVE:
            await cluster.start(name)
        await trained(cluster, 2)
        name = cluster.role("relay")
        gone = cluster.crash(name)
        again = await cluster.start(name, disk=gone.disk, known=[cluster.running["elector"].id])
        await trio.sleep(0.1)
        assert again.own.role == "relay"
        await trained(cluster, 5)
        assert role_entries(again) == ["relay"]
        assert cluster.role("relay") == name


async def test_nobody_takes_a_role_before_the_first_term(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        for name in ("elector", "a"):
            await cluster.start(name, willing=())
        await trio.sleep(20)
        assert all(r.own.role == "none" and role_entries(r) == [] for r in cluster.running.values())


# --- one manager -------------------------------------------------------------------------------------------------


class Lives:
    """Stand-ins for the roles' lives that note what happens to them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.failures: list[Exception] = []
        self.lives = {role: partial(self._live, role) for role in ("trainer", "relay", "validator", "inference")}

    @property
    def starts(self) -> list[float]:
        """When a life began."""
        return [float(event.split()[1]) for event in self.events if not event.endswith("ended")]

    async def _live(self, role: str) -> None:
        self.events.append(f"{role} {trio.current_time():.1f}")
        try:
            if self.failures:
                raise self.failures.pop(0)
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)
            self.events.append(f"{role} ended")


async def managed(cluster: Cluster, role: str) -> Running:
    """Node "a" with a manager, a standing role, and a term given to "t"."""
    await cluster.stage(t="trainer", v="validator", r="relay", a=role)
    running = cluster.running["a"]
    running.keep(ROLES)
    return running


async def test_the_old_role_has_ended_before_the_new_one_begins(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    lives = Lives()
    async with open_cluster(tmp_path, faults, lives=lives.lives) as cluster:
        running = await managed(cluster, "inference")
        await trio.sleep(2)
        cluster.crash("r")
        await cluster.until(lambda: running.own.role == "relay", 10)
        await trio.sleep(1)
        assert [event.partition(" ")[0] for event in lives.events] == ["inference", "inference", "relay"]
        assert lives.events[1] == "inference ended"
        assert role_entries(running) == ["inference", "relay"]


async def test_a_change_must_have_stood_for_three_intervals(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults, lives=Lives().lives) as cluster:
        running = await managed(cluster, "inference")
        await trio.sleep(2)
        cluster.network.partition([running.id], [cluster.running["r"].id])
        await trio.sleep(2)  # its presence lapses after three intervals of half a second
        cluster.network.heal()
        await trio.sleep(5)
        assert running.own.role == "inference"
        cluster.network.partition([running.id], [cluster.running["r"].id])
        await trio.sleep(5)
        assert running.own.role == "relay"


async def test_a_failing_role_begins_again_after_longer_and_longer_pauses(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    lives = Lives()
    async with open_cluster(tmp_path, faults, lives=lives.lives) as cluster:
        lives.failures = [
            WorkerError("engine: the child ended", "died"),
            OSError(28, "No space left on device"),
            trio.TooSlowError(),
            LocalError("x"),
        ]
        running = await managed(cluster, "relay")
        await trio.sleep(1)
        text = running.warnings["the relay role"]
        assert text == "the relay role stopped: engine: the child ended; it starts again in 1 s"
        await trio.sleep(18)
        gaps = [round(b - a - 0.2) for a, b in pairwise(lives.starts)]
        assert gaps == [1, 2, 4, 8]
        assert "the relay role" in running.warnings
        await trio.sleep(role_manager.POLICY.steady)  # well for so long: the warning goes
        assert running.warnings == {}


async def test_a_role_that_fails_again_and_again_is_left_to_others_for_a_while(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    lives = Lives()
    async with open_cluster(tmp_path, faults, lives=lives.lives) as cluster:
        lives.failures = [WorkerError("no memory", "died") for _ in range(role_manager.MAX_FAILURES)]
        running = await managed(cluster, "relay")
        await cluster.until(lambda: running.own.role != "relay")
        assert running.warnings["relay role"] == (
            "the relay role failed 5 times in a row (no memory) and is left to others for a while"
        )
        assert "relay" not in running.own.willing()
        await cluster.until(lambda: running.own.role == "inference")
        await trio.sleep(role_manager.UNFIT)
        assert "relay" in running.own.willing()
        assert running.warnings == {}


async def test_a_role_that_cannot_be_laid_down_is_tried_again(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    lives = Lives()
    async with open_cluster(tmp_path, faults, lives=lives.lives) as cluster:
        lives.failures = [OSError(28, "No space left on device") for _ in range(role_manager.MAX_FAILURES)]
        running = await managed(cluster, "relay")
        running.disk.full = True
        await trio.sleep(role_manager.UNFIT + 30)
        assert running.own.role == "relay"
        assert [event.partition(" ")[0] for event in lives.events][-1] == "relay"
        assert len(lives.events) == 2 * role_manager.MAX_FAILURES + 1


async def test_a_trainer_that_cannot_train_loses_its_term(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    faults.fail["train"] = (WorkerError("no memory", "died"), role_manager.MAX_FAILURES)
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.start("elector", willing=("inference",))
        for name in ("a", "b", "c", "d"):
            await cluster.start(name, willing=WILLING)
        await cluster.until(lambda: any(r.own.role == "trainer" for r in cluster.running.values()))
        first = cluster.running[cluster.role("trainer")]
        await cluster.until(lambda: "trainer role" in first.node.health.warnings, 120)
        await cluster.until(lambda: all(r.steps >= 1 for r in cluster.running.values()))
        (step,) = (s.payload for s in first.node.log.ledger.steps()[:1])
        assert isinstance(step, Step)
        assert step.term == 2
        assert first.own.role not in ("trainer", "none")


async def test_a_bug_in_a_role_is_contained_and_told(
    tmp_path: Path,
    faults: Faults,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    lives = Lives()
    async with open_cluster(tmp_path, faults, lives=lives.lives) as cluster:
        lives.failures = [KeyError("weights")]
        running = await managed(cluster, "relay")
        await trio.sleep(3)
        assert len(lives.events) == 3
        assert "'weights'" in running.warnings["the relay role"]
        (record,) = (record for record in caplog.records if record.levelname == "ERROR")
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], KeyError)


async def test_what_its_owner_must_mend_is_not_tried_again_at_once(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    lives = Lives()
    async with open_cluster(tmp_path, faults, lives=lives.lives) as cluster:
        lives.failures = [UserError("no sandbox", "install bubblewrap")]
        running = await managed(cluster, "relay")
        await trio.sleep(25)
        assert len(lives.events) == 2
        assert "install bubblewrap; it starts again in 30 s" in running.warnings["the relay role"]
        await trio.sleep(10)
        assert len(lives.events) == 3


async def test_a_full_disk_delays_a_role_and_ends_nothing(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults, lives=Lives().lives) as cluster:
        running = await managed(cluster, "inference")
        running.disk.full = True
        cluster.crash("r")
        await trio.sleep(10)
        assert running.own.role == "inference"
        assert "no space left" in running.warnings["role entry"]
        running.disk.full = False
        await trio.sleep(2)
        assert running.own.role == "relay"
        assert "role entry" not in running.warnings


async def test_a_feed_that_waits_for_a_cut_delays_a_role(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults, lives=Lives().lives) as cluster:
        running = await managed(cluster, "inference")
        anchored = sum(
            e.anchor == running.node.log.replica.newest_cut_id for e in running.node.log.replica.entries(running.id)
        )
        for _ in range(256 - anchored):
            await running.node.log.append(Role("inference"))
        cluster.crash("r")
        await trio.sleep(25)
        assert running.own.role == "inference"
        assert "too many entries wait for a cut" in running.warnings["role entry"]
        await cluster.cut()
        await trio.sleep(15)
        assert running.own.role == "relay"
