"""How a devnet starts, watches and ends its processes, whatever they do. The nodes are stand-ins; see ``tests/e2e``."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from node.devnet import network, setup
from node.devnet.fleet import Pace
from node.devnet.live_display import View
from node.devnet.network import PATIENCE, Patience
from node.devnet.setup import Options
from node.domain.domain_toml import Founding
from node.errors import UserError
from node.store.data_directory import DataDirectory
from tests.node import fake_daemon


class Recorder:
    """A display that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.views: list[View] = []
        self.on_update: Callable[[View], None] = lambda view: None

    def update(self, view: View) -> None:
        self.views.append(view)
        self.on_update(view)

    def say(self, text: str) -> None:
        self.said.append(text)

    def conclude(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None:
        pass


@dataclass
class Fakes:
    """Makes the domain for stand-ins of the daemons; set a node's behaviour by its name."""

    behaviours: dict[str, str] = field(default_factory=dict)

    async def check(self, founding: Founding) -> None:
        assert founding.devnet

    async def found(self, directory: DataDirectory, founding: Founding) -> None:
        assert founding.policy.min_nodes == 4
        for node, behaviour in self.behaviours.items():
            (directory.path.parent / node / "behaviour").write_text(behaviour)


def command(directory: DataDirectory) -> list[str]:
    return [sys.executable, "-S", fake_daemon.__file__, str(directory.path)]


async def run(options: Options, display: Recorder, patience: Patience = PATIENCE, **behaviours: str) -> int:
    """Run stand-ins, ``node_3`` by its behaviour."""
    fakes = Fakes({name.replace("_", "-"): behaviour for name, behaviour in behaviours.items()})
    pace = Pace(poll=0.05, restart_pause=0.05)
    with trio.fail_after(30):
        return await network.run(
            options,
            lambda: display,
            command=command,
            check=fakes.check,
            found=fakes.found,
            pace=pace,
            patience=patience,
        )


async def test_it_ends_well_when_all_nodes_agree(tmp_path: Path) -> None:
    display = Recorder()
    assert await run(Options(tmp_path / "run", nodes=4, steps=3), display) == 0
    assert any("all 4 nodes hold the same log" in text for text in display.said)
    assert str(tmp_path / "run" / "report.html") in display.said
    last = display.views[-1]
    assert last.phase == "done"
    assert last.address.startswith("/ip4/127.0.0.1/tcp/")
    assert [row.step for row in last.steps] == [1, 2, 3]
    assert last.bytes == 4 * 3000
    assert [node.credit for node in last.nodes] == [3, 0, 0, 0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["bytes"] == 12_000
    # A status tells the newest only; the devnet collects them.
    assert {row["version"] for row in summary["evaluations"]} >= {2, 3}
    assert summary["evaluations"][-1] == {
        "version": 3,
        "task": "sums",
        "questions": 64,
        "pass_rate": 0.5,
        "pass_rate_low": 0.4,
        "pass_rate_high": 0.6,
        "reward": 0.5,
    }
    assert "Held-out questions" in (tmp_path / "run" / "report.html").read_text()


async def test_nodes_that_do_not_agree_are_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    display = Recorder()
    asked = Options(tmp_path / "run", nodes=4, steps=1)
    assert await run(asked, display, Patience(agree=0.3), node_3="different") == 1
    assert any("did not agree" in text and "node-3 ffffffff" in text for text in display.said)


async def test_a_node_that_dies_is_started_again_and_the_run_ends_well(tmp_path: Path) -> None:
    display = Recorder()
    assert await run(Options(tmp_path / "run", nodes=4, steps=4), display, node_2="dies") == 0
    assert any(text.startswith("node-2 died (signal SIGKILL)") for text in display.said)
    # What it had sent before its death still counts; its counters began anew.
    assert display.views[-1].nodes[1].sent >= 4000


async def test_a_nodes_mistake_is_the_devnets(tmp_path: Path) -> None:
    display = Recorder()
    with pytest.raises(UserError, match="node-4: port 4001 is busy"):
        await run(Options(tmp_path / "run", nodes=4, steps=1), display, node_4="mistake")
    assert (tmp_path / "run" / "summary.json").exists()
    assert display.views[-1].phase == "failed"


async def test_an_interrupt_ends_everything_soon_and_still_writes_the_summary(tmp_path: Path) -> None:
    display = Recorder()
    pressed: list[float] = []

    def press(view: View) -> None:
        # Twice, as impatient people do.
        if all(node.state == "running" for node in view.nodes) and len(pressed) < 2:
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    display.on_update = press
    assert await run(Options(tmp_path / "run", nodes=4, steps=10**6), display, node_2="deaf") == 130
    assert time.monotonic() - pressed[0] < 5
    assert display.views[-1].phase == "interrupted"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "run" / "node-2" / "child").read_text()), 0)


async def test_keep_running_goes_on_after_the_summary(tmp_path: Path) -> None:
    display = Recorder()

    def press(view: View) -> None:
        if all(node.version > 4 for node in view.nodes) and view.phase != "interrupted":
            os.kill(os.getpid(), signal.SIGINT)

    display.on_update = press
    assert await run(Options(tmp_path / "run", nodes=4, steps=2, keep_running=True), display) == 130
    assert any(view.phase.startswith("running on") for view in display.views)
    assert DataDirectory(tmp_path / "run" / "node-3").config().devnet.pause_at_step == 0


async def test_a_stall_is_told_of(tmp_path: Path) -> None:
    slow = {f"node_{number}": "slow" for number in range(1, 5)}
    display = Recorder()
    assert await run(Options(tmp_path / "run", nodes=4, steps=4), display, Patience(stall=0.02), **slow) == 0
    assert any(text.startswith("no step for") for text in display.said)


def test_directories_are_ready_for_daemons(tmp_path: Path) -> None:
    members = setup.prepare(Options(tmp_path, nodes=4, steps=7, cheats=("forged-reward", "forged-reward")))
    assert [member.name for member in members] == [
        *("node-1", "node-2", "node-3", "node-4"),
        *("cheat-forged-reward", "cheat-forged-reward-2"),
    ]
    configs = [member.directory.config() for member in members]
    assert configs[0].bootstrap == ()
    assert all(config.bootstrap == (members[0].address,) for config in configs[1:])
    assert all(config.devnet.pause_at_step == 7 for config in configs)
    assert [config.willing == ("inference",) for config in configs] == [False] * 4 + [True] * 2
    assert [config.devnet.cheat for config in configs] == [""] * 4 + ["forged-reward"] * 2
    assert len({config.listen for config in configs}) == 6
    for member in members:
        assert stat.S_IMODE(member.directory.key_file.stat().st_mode) == 0o600
    assert len({member.directory.read_identity().node for member in members}) == 6


def test_a_seed_gives_the_same_keys_again(tmp_path: Path) -> None:
    def nodes(folder: str, seed: int | None) -> list[bytes]:
        members = setup.prepare(Options(tmp_path / folder, nodes=4, seed=seed))
        return [member.directory.read_identity().node for member in members]

    assert nodes("a", 1) == nodes("b", 1)
    assert not set(nodes("c", 2)) & set(nodes("d", None))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 3}, "--nodes 3"),
        ({"nodes": 100}, "--nodes 100"),
        ({"steps": 0}, "--steps 0"),
        ({"cheats": ("laziness",)}, "--cheat laziness"),
    ],
)
async def test_mistakes_are_told_before_anything_is_made(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        await run(Options(tmp_path / "run", **options), Recorder())  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


async def test_an_unknown_task_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="chain_sun"):
        await network.run(Options(tmp_path / "run", tasks="chain_sun"), Recorder)
    assert not (tmp_path / "run").exists()


async def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="not empty"):
        await run(Options(tmp_path), Recorder())
    with pytest.raises(UserError, match="a file of that name"):
        await run(Options(tmp_path / "thesis.txt"), Recorder())


def test_the_default_folder_is_below_the_working_directory() -> None:
    assert setup.default_folder().parts[0] == "devnet"
