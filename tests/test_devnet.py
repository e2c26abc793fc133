"""The main job, end to end: real daemons train a real model; what is asserted stands in the nodes' own logs."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from node.api.control_client import request
from node.log.offline_verification import LogReport, verify
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from protocol.constants import MILLION
from protocol.credit.ledger import Ledger
from protocol.records import Rollout, Step, StepBlob, Verdict, Weights
from protocol.work.rollout import Submission
from tests.protocol.builders import status_of

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).resolve().parents[1]
STEP_LINE = re.compile(
    r"step (\d+)  reward (\d\.\d{3})  lag \d+\.\d \(max \d+\)  accepted \d+  rejected \d+  \d+\.\d s  [\d.]+ [kMG]B"
)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "node.cli.main", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@dataclass
class Run:
    """A devnet that has ended."""

    folder: Path
    output: str
    code: int

    def logs(self) -> dict[str, LogReport]:
        """Every node's log, checked from its bytes."""
        return {path.parent.name: verify(DataDirectory(path.parent)) for path in sorted(self.folder.glob("*/log"))}


def processes_of(folder: Path) -> list[int]:
    """The processes that name the folder in their command line, or work where its devnet was started: children do."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                named = str(folder).encode() in (entry / "cmdline").read_bytes()
                if named or (entry / "cwd").readlink() == folder.parent:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def devnet(folder: Path, *arguments: str) -> Run:
    done = subprocess.run(
        command("devnet", "--dir", str(folder), *arguments),
        cwd=folder.parent,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return Run(folder, done.stdout, done.returncode)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Five honest nodes, three steps."""
    return devnet(tmp_path_factory.mktemp("honest") / "run", "--steps", "3")


@pytest.fixture(scope="module")
def cheated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Five honest nodes and two that cheat, three steps."""
    cheats = ("--cheat", "wrong-weights", "--cheat", "forged-reward")
    return devnet(tmp_path_factory.mktemp("cheated") / "run", "--steps", "3", *cheats)


@pytest.mark.parametrize("name", ["honest", "cheated"])
def test_it_converges_and_leaves_nothing_running(name: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    assert run.code == 0, run.output
    assert processes_of(run.folder) == []


@pytest.mark.parametrize("name", ["honest", "cheated"])
def test_all_nodes_hold_the_same_valid_log(name: str, request: pytest.FixtureRequest) -> None:
    logs = request.getfixturevalue(name).logs()
    assert len(logs) == {"honest": 5, "cheated": 7}[name]
    assert [problem for log in logs.values() for problem in log.problems] == []
    assert len({log.replica.heads_root() for log in logs.values()}) == 1
    assert len({log.text() for log in logs.values()}) == 1
    # Everything is final: the last cut covers all there is.
    assert all(log.replica.uncovered() == [] for log in logs.values())


@pytest.mark.parametrize("name", ["honest", "cheated"])
def test_each_of_the_four_roles_is_taken(name: str, request: pytest.FixtureRequest) -> None:
    log = request.getfixturevalue(name).logs()["node-1"]
    ledger = Ledger(log.replica)
    roles = {ledger.name(author): ledger.standing_role(author) for author in ledger.authors()}
    assert {roles[f"node-{number}"] for number in range(1, 6)} == {"trainer", "relay", "validator", "inference"}
    assert list(roles.values()).count("trainer") == 1
    assert all(role == "inference" for name, role in roles.items() if name.startswith("cheat-"))


def test_verdicts_are_replayed_by_anybody_who_has_the_files(cheated: Run) -> None:
    log = cheated.logs()["node-1"]
    verdicts = [entry for entry in log.replica.arrivals if isinstance(entry.payload, Verdict)]
    validator = Ledger(log.replica).name(verdicts[0].author)
    newest = {verdict.payload.reason: verdict for verdict in verdicts if isinstance(verdict.payload, Verdict)}
    assert newest.keys() >= {"ok", "sampling", "reward"}
    half = cheated.folder / validator / "blobs" / "tmp" / "half"  # as a daemon leaves it that is writing
    half.write_bytes(b"he")
    marks = {path: path.read_bytes() for path in (cheated.folder / validator / "versions").glob("*/chunks")}
    assert marks
    for reason in ("ok", "sampling", "reward"):
        folder = ("--data-dir", str(cheated.folder / validator))
        done = subprocess.run(
            command("proofs", "replay", newest[reason].id.hex(), "--json", *folder),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["confirmed"], told["draw_holds"], told["share"]) == (True, True, 1.0)
        assert told["said"]["reason"] == told["replayed"]["reason"] == reason
        assert told["said"]["score"] == told["replayed"]["score"]
        assert told["drawn"] == list(range(8))
    assert half.exists()
    assert {path: path.read_bytes() for path in marks} == marks


@pytest.mark.parametrize("name", ["honest", "cheated"])
def test_a_steps_reward_is_the_mean_of_what_it_was_trained_on(name: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    log = run.logs()["node-1"]
    ledger = Ledger(log.replica)
    trainer = next(a for a in ledger.authors() if ledger.standing_role(a) == "trainer")
    blobs = BlobStore(run.folder / ledger.name(trainer) / "blobs")
    steps = [entry.payload for entry in ledger.steps() if isinstance(entry.payload, Step)]
    assert [step.number for step in steps] == [1, 2, 3]
    used: set[bytes] = set()
    for step in steps:
        listed = StepBlob.parse(blobs.get(step.blob) or b"").submissions
        rewards = []
        for rollout, _ in listed:
            assert rollout not in used
            used.add(rollout)
            entry = log.replica.entry(rollout)
            assert entry is not None
            assert isinstance(entry.payload, Rollout)
            assert status_of(ledger, rollout).outcome == "accepted"
            submission = Submission.parse(blobs.get(entry.payload.submission) or b"", log.replica.domain.recipe)
            rewards += [response.reward for group in submission.groups for response in group.responses]
        assert step.reward == sum(rewards) // len(rewards)
        assert step.accepted == len(rewards)
        assert step.lag_max <= log.replica.domain.recipe.async_level
        assert 0.15 * MILLION < step.reward < MILLION  # the starter model answers some questions, and not all


def test_the_summary_says_what_the_log_says(honest: Run) -> None:
    summary = json.loads((honest.folder / "summary.json").read_text())
    log = honest.logs()["node-1"]
    ledger = Ledger(log.replica)
    rewards = [entry.payload.reward for entry in ledger.steps() if isinstance(entry.payload, Step)]
    assert [round(step["reward"] * MILLION) for step in summary["steps"]] == rewards
    assert [row["name"] for row in summary["nodes"]] == [f"node-{number}" for number in range(1, 6)]
    assert {row["id"]: row["credit"] for row in summary["nodes"]} == {
        author.hex(): account.credit for author, account in log.ledger.accounts(final=True).items()
    }
    assert all(row["credit"] > 0 for row in summary["nodes"] if row["role"] != "relay")
    assert all(row["rejections"] == [] for row in summary["nodes"])
    # At least every entry went to each of the four that did not write it.
    assert summary["bytes"] > 4 * sum(len(entry.encode()) for entry in log.replica.arrivals) > 0
    assert (honest.folder / "report.html").read_text().count("<svg") == 6


def test_without_a_terminal_there_is_a_line_a_step_and_the_address(honest: Run) -> None:
    lines = honest.output.splitlines()
    assert [line for line in lines if line.startswith("step ")] == [line for line in lines if STEP_LINE.fullmatch(line)]
    assert sum(1 for line in lines if line.startswith("step ")) == 3
    assert sum(1 for line in lines if re.search(r" /ip4/127\.0\.0\.1/tcp/\d+/p2p/12D3KooW\w+$", line)) == 1


def test_keys_are_for_their_owner_only(honest: Run) -> None:
    keys = list(honest.folder.glob("*/identity.key"))
    assert len(keys) == 5
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}


def test_log_verify_prints_the_same_bytes_for_any_two_nodes(honest: Run) -> None:
    outputs = []
    for node in ("node-2", "node-5"):
        done = subprocess.run(
            command("log", "verify", str(honest.folder / node)),
            env=environment(),
            capture_output=True,
            timeout=60,
            check=True,
        )
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert b"heads root " in outputs[0]
    assert outputs[0].count(b"credit ") == 5


def test_cheats_are_rejected_for_what_they_did_and_earn_nothing(cheated: Run) -> None:
    log = cheated.logs()["node-1"]
    accounts = {log.ledger.name(author): account for author, account in log.ledger.accounts(final=True).items()}
    wrong, forged = accounts["cheat-wrong-weights"], accounts["cheat-forged-reward"]
    for account in (wrong, forged):
        assert account.hard > 0
        assert (account.accepted, account.credit) == (0, 0)
        assert account.reputation < 100_000
    assert set(wrong.reasons) <= {"sampling", "logprobs", "activations", "late"}
    assert set(forged.reasons) <= {"reward", "late"}
    honest_nodes = [account for name, account in accounts.items() if name.startswith("node-")]
    assert all(account.hard == 0 for account in honest_nodes)
    summary = json.loads((cheated.folder / "summary.json").read_text())
    reasons = {row["name"]: {r["reason"] for r in row["rejections"]} for row in summary["nodes"]}
    assert "reward" in reasons["cheat-forged-reward"]


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A devnet whose output can be read while it runs."""
    process = subprocess.Popen(
        command("devnet", "--dir", str(folder), *arguments),
        cwd=folder.parent,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()  # its daemons ask the kernel to end with it


def read_until(process: subprocess.Popen[str], wanted: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if re.search(wanted, line):
            return line
    raise AssertionError(f"the devnet ended without {wanted!r}")


def test_a_killed_node_resumes_and_an_interrupt_ends_everything(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder, "--steps", "1000") as process:
        read_until(process, r"^step 1 ")
        victim = folder / "node-3"
        os.kill(int((victim / "lock").read_text()), signal.SIGKILL)
        assert "node-3 died (signal SIGKILL)" in read_until(process, "died")
        while int((victim / "boot").read_text()) < 2:
            read_until(process, r"^step ")
        read_until(process, r"^step ")
        assert len(processes_of(folder)) >= 10  # the devnet, five daemons, and a child at least for four of them
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert time.monotonic() - began < 6  # five seconds for the processes, and the summary
        assert processes_of(folder) == []
    assert len(json.loads((folder / "summary.json").read_text())["steps"]) >= 2
    # What it had written before it was killed, it has still, and it forked nothing.
    log = verify(DataDirectory(victim))
    assert log.problems == ()
    assert len(Ledger(log.replica).steps()) >= 2
    assert all(head.status == 0 for head in log.replica.heads.values())


def status(folder: Path) -> dict[str, Any]:
    """What the daemon of a data directory says of itself."""
    return trio.run(partial(request, DataDirectory(folder), "status", timeout=30))


def test_nodes_and_children_that_are_killed_come_back_and_the_run_converges(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder, "--nodes", "4", "--steps", "5") as process:
        read_until(process, r"^step 2 ")
        roles = {status(path)["role"]: path for path in sorted(folder.glob("node-*"))}
        assert roles.keys() == {"trainer", "relay", "validator", "inference"}
        children = {child["name"]: child["pid"] for child in status(roles["trainer"])["children"]}
        assert children.keys() == {"bulk", "trainer"}
        for child in children.values():
            os.kill(child, signal.SIGKILL)
        os.kill(int((roles["validator"] / "lock").read_text()), signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    logs = Run(folder, output, 0).logs()
    assert len(logs) == 4
    assert [problem for log in logs.values() for problem in log.problems] == []
    assert len({log.text() for log in logs.values()}) == 1
    log = logs["node-1"]
    assert log.replica.uncovered() == []
    assert log.replica.forks == {}
    # As many steps as were asked for, though weights may have been announced twice for another validator.
    ledger = Ledger(log.replica)
    assert len(ledger.steps()) == 5
    assert len(json.loads((folder / "summary.json").read_text())["steps"]) == 5
    lineage = [entry.payload for entry in ledger.lineage() if isinstance(entry.payload, Weights)]
    assert [weights.number for weights in lineage] == list(range(len(lineage)))
    assert int((roles["validator"] / "boot").read_text()) == 2
    assert processes_of(folder) == []
