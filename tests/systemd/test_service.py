"""The script and the service on a real systemd: Debian 12 in a container, installed from a wheel, beside a devnet here.

The tests are one story and run in the order in which they stand: each leaves the machine as the next one needs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from node.devnet.fleet import free_ports
from node.systemd import installing
from tests.systemd.machine import Machine, booted, wait, wheelhouse

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(2000)]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "systemd" / "bootstrap.sh"
NEEDED = ("debootstrap", "systemd-nspawn", "nsenter", "apt-get")
WELL = 120.0
"""Seconds for what a machine that does nothing else does in five."""


@dataclass
class World:
    """The machine, and its peers: a devnet's address and folder."""

    machine: Machine
    address: str
    network: Path
    wheels: Path

    def script(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The script from a pipe, as root, without any index."""
        return self.machine.run(
            "sh",
            "-s",
            "--",
            *words,
            stdin=SCRIPT.read_text(),
            timeout=1800,
            PIP_NO_INDEX="1",
            PIP_FIND_LINKS="/wheelhouse",
        )

    def install(self, wheel: str = "old", address: str | None = None) -> subprocess.CompletedProcess[str]:
        (file,) = (self.wheels / wheel).glob("*.whl")
        words = ["join", self.address if address is None else address, "--yes", "--service"]
        return self.script(*words, "--source", f"/wheels/{wheel}/{file.name}")

    def show(self, key: str) -> str:
        return self.machine.out("systemctl", "show", "farflung", "-p", key, "--value")

    def pid(self) -> int:
        return int(self.show("MainPID"))

    def restarts(self) -> int:
        return int(self.show("NRestarts"))

    def active(self) -> bool:
        return self.show("ActiveState") == "active"

    def processes(self) -> dict[int, str]:
        """The command lines of the service's account by pid."""
        rows = self.machine.run("ps", "-u", "farflung", "-ww", "-o", "pid=,args=").stdout.splitlines()
        return {int(row.split()[0]): row.strip().partition(" ")[2] for row in rows}

    def child(self, module: str) -> int | None:
        found = [pid for pid, line in self.processes().items() if line.startswith("/opt") and module in line]
        return found[0] if found else None

    def identity(self) -> str:
        return self.machine.out("sha256sum", "/var/lib/farflung/identity.key")


def build(source: Path, folder: Path) -> Path:
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``old`` and ``new``: this version, and one that calls itself 99.0."""
    folder = tmp_path_factory.mktemp("wheels")
    build(ROOT, folder / "old")
    copy = folder / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "devnet", "tests", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    package = copy / "node" / "__init__.py"
    package.write_text(re.sub(r'__version__ = ".*"', '__version__ = "99.0"', package.read_text()))
    build(copy, folder / "new")
    shutil.rmtree(copy)
    return folder


def pause(folder: Path, step: int) -> None:
    """Have a devnet stop after ``step`` steps, so that the machine has the processors for itself; 0: go on."""
    for number in range(1, 5):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(WELL)
            channel.connect(str(folder / f"node-{number}" / "control.sock"))
            channel.sendall(json.dumps({"op": "pause_at", "step": step}).encode() + b"\n")
            assert json.loads(channel.recv(1000)) == {"pause_at_step": step}


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A devnet on this machine: its address and its folder."""
    folder = tmp_path_factory.mktemp("network") / "run"
    words = [sys.executable, "-P", "-m", "node.cli.main", "devnet", "--nodes", "4"]
    words += ["--steps", "100000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = folder.with_name("output")
    with output.open("wb") as file:
        devnet = subprocess.Popen(
            [*words, "--dir", str(folder)], env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        wait("the devnet's address", lambda: "/p2p/" in output.read_text(), WELL)
        found = re.search(r"/ip4/\S+/p2p/\w+", output.read_text())
        assert found is not None
        wait("its first step", lambda: "\nstep " in output.read_text(), 2 * WELL)
        pause(folder, 1)
        yield found[0], folder
    finally:
        devnet.send_signal(signal.SIGINT)
        devnet.wait(60)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, wheels: Path, peer: tuple[str, Path]) -> Iterator[World]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("needs Python 3.11, for which Debian 12 can use the same wheels")
    torch = re.search(r'^TORCH_CPU="(.*)"$', SCRIPT.read_text(), re.MULTILINE)
    (old,) = (wheels / "old").glob("*.whl")
    assert torch is not None
    binds = [(wheelhouse(old, torch[1]), "/wheelhouse"), (wheels, "/wheels")]
    with booted(tmp_path_factory.mktemp("machine"), binds) as machine:
        machine.out("mkdir", "/etc/farflung")
        # The machine shares our network, where the usual port may be taken.
        listen = f'listen = ["/ip4/127.0.0.1/tcp/{free_ports(1)[0]}"]\n'
        machine.out("tee", "/etc/farflung/farflung.toml", stdin=listen)
        yield World(machine, *peer, wheels)


def test_another_domain_is_refused_and_no_service_installed(world: World) -> None:
    done = world.install(address=f"{world.address}?domain={'ab' * 32}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("farflung: ")
    assert world.show("LoadState") == "not-found"
    assert world.machine.run("ls", "/var/lib/farflung/genesis").returncode != 0


def test_the_script_installs_and_starts_it(world: World) -> None:
    done = world.install()
    assert done.returncode == 0, done.stderr
    assert "it serves" in done.stderr
    assert world.active()
    assert world.machine.out("systemctl", "is-enabled", "farflung") == "enabled"
    rows = world.machine.out(
        "stat", "-c", "%U %a %n", "/var/lib/farflung", "/var/lib/farflung/identity.key", "/opt/farflung"
    )
    assert rows.splitlines() == [
        "farflung 700 /var/lib/farflung",
        "farflung 600 /var/lib/farflung/identity.key",
        "root 755 /opt/farflung",
    ]


def test_systemd_accepts_the_unit(world: World) -> None:
    verified = world.machine.run("systemd-analyze", "verify", "/etc/systemd/system/farflung.service")
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    report = world.machine.out("systemd-analyze", "security", "--no-pager", "farflung")
    score = re.search(r"Overall exposure level for farflung.service: ([\d.]+)", report)
    assert score is not None
    assert float(score[1]) <= 3.5  # docs/OPERATING.md names it
    warnings = world.machine.out("journalctl", "-q", "-b", "_PID=1", "-p", "warning", "-o", "cat")
    assert "farflung.service" not in warnings


def test_it_works_inside_its_sandbox(world: World) -> None:
    """A role with torch and with bubblewrap around the tasks: both run as the service's children."""
    wait("a role's children", lambda: world.child("node.workers.") and world.child("node.tasks.task_child"), 2 * WELL)
    assert "peers" in world.show("StatusText")
    status = world.machine.out("systemctl", "status", "--no-pager", "farflung")
    assert "active (running)" in status
    assert "sandbox" not in world.machine.out("journalctl", "-q", "-u", "farflung", "-o", "cat")


def test_the_journal_has_priorities_and_no_second_time(world: World) -> None:
    rows = world.machine.out("journalctl", "-q", "_SYSTEMD_UNIT=farflung.service", "-o", "json").splitlines()
    records = [json.loads(row) for row in rows]
    serves = next(record for record in records if " serves at " in record["MESSAGE"])
    assert serves["PRIORITY"] == "6"
    assert serves["MESSAGE"].startswith("farflung: ")


def test_a_killed_child_comes_back_and_the_daemon_stays(world: World) -> None:
    daemon, child = world.pid(), world.child("node.workers.")
    assert child is not None
    world.machine.out("kill", "-9", str(child))
    pause(world.network, 0)  # a role whose work is not wanted does not miss its child
    wait("another child", lambda: world.child("node.workers.") not in (None, child), WELL)
    pause(world.network, 1)
    assert world.pid() == daemon
    assert world.active()


def test_a_killed_daemon_comes_back_and_leaves_no_child(world: World) -> None:
    before, count = set(world.processes()), world.restarts()
    world.machine.out("kill", "-9", str(world.pid()))
    wait("the restart", lambda: world.restarts() == count + 1 and world.active(), WELL)
    assert not before & set(world.processes())


def test_a_mistake_is_told_and_not_retried(world: World) -> None:
    good = world.machine.out("cat", "/etc/farflung/farflung.toml")
    world.machine.out("tee", "/etc/farflung/farflung.toml", stdin='lissten = ["x"]\n')
    assert world.machine.run("systemctl", "restart", "farflung").returncode != 0
    assert world.show("ActiveState") == "failed"
    assert world.show("ExecMainStatus") == "2"
    errors = world.machine.out(
        "journalctl", "-q", "-p", "err", "_SYSTEMD_UNIT=farflung.service", "-n", "1", "-o", "cat"
    )
    assert "lissten" in errors
    world.machine.out("tee", "/etc/farflung/farflung.toml", stdin=good + "\n")
    world.machine.out("systemctl", "restart", "farflung", timeout=WELL)


def test_it_stops_within_its_time_and_leaves_nothing(world: World) -> None:
    world.machine.out("systemctl", "stop", "farflung", timeout=31)
    assert world.show("Result") == "success"
    assert world.processes() == {}
    world.machine.out("systemctl", "start", "farflung", timeout=WELL)


def test_the_watchdog_ends_a_daemon_that_stands_still(world: World) -> None:
    world.machine.out("mkdir", "-p", "/run/systemd/system/farflung.service.d")
    world.machine.out("tee", "/run/systemd/system/farflung.service.d/test.conf", stdin="[Service]\nWatchdogSec=20\n")
    world.machine.out("systemctl", "daemon-reload")
    world.machine.out("systemctl", "restart", "farflung", timeout=WELL)
    daemon = world.pid()
    world.machine.out("kill", "-STOP", str(daemon))
    wait("the watchdog's restart", lambda: world.pid() not in (0, daemon) and world.active(), WELL)
    told = world.machine.out("journalctl", "-q", "-b", "_PID=1", "-u", "farflung", "-o", "cat")
    assert "Watchdog timeout" in told
    world.machine.out("rm", "-r", "/run/systemd/system/farflung.service.d")
    world.machine.out("systemctl", "daemon-reload")


def test_it_comes_back_with_the_machine(world: World) -> None:
    identity = world.identity()
    world.machine.reboot()
    wait("the service after the boot", world.active, WELL)
    assert world.identity() == identity


def test_installing_again_upgrades_and_keeps_identity_and_data(world: World) -> None:
    identity, daemon = world.identity(), world.pid()
    cuts = world.machine.out("stat", "-c", "%s", "/var/lib/farflung/log/log.db")
    done = world.install("new")
    assert done.returncode == 0, done.stderr
    assert "joined already" in done.stderr
    assert world.machine.out("/opt/farflung/venv/bin/farflung", "--version") == "farflung 99.0"
    assert world.pid() != daemon
    assert world.active()
    assert world.identity() == identity
    assert int(world.machine.out("stat", "-c", "%s", "/var/lib/farflung/log/log.db")) >= int(cuts)


def test_a_user_installs_a_service_of_their_own(world: World) -> None:
    machine = world.machine
    machine.out("systemctl", "stop", "farflung", timeout=60)
    machine.out("useradd", "--create-home", "alice")
    machine.out("loginctl", "enable-linger", "alice")
    number = machine.out("id", "-u", "alice")
    wait("the user's manager", lambda: machine.run("test", "-S", f"/run/user/{number}/bus").returncode == 0, WELL)
    folder = "/home/alice/.local/share/farflung/node"
    machine.out("mkdir", "-p", folder, user="alice")
    machine.out("cp", "/etc/farflung/farflung.toml", folder, user="alice")
    program = "/opt/farflung/venv/bin/farflung"
    done = machine.run(program, "service", "install", "--join", world.address, "--yes", user="alice", timeout=WELL)
    assert done.returncode == 0, done.stderr
    bus = f"/run/user/{number}"
    shown = machine.out(
        "systemctl", "--user", "show", "farflung", "-p", "ActiveState,StatusText", user="alice", XDG_RUNTIME_DIR=bus
    )
    assert "ActiveState=active" in shown
    machine.out(program, "service", "remove", "--purge", user="alice", timeout=60)
    assert machine.run("ls", folder).returncode != 0
    assert "not-found" in machine.out(
        "systemctl", "--user", "show", "farflung", "-p", "LoadState", user="alice", XDG_RUNTIME_DIR=bus
    )


def test_uninstalling_keeps_the_key(world: World) -> None:
    identity = world.identity()
    # Spares the test a second installation of torch.
    world.machine.out("cp", "-al", "/opt/farflung/venv", "/opt/aside")
    done = world.script("uninstall")
    assert done.returncode == 0, done.stderr
    assert world.show("LoadState") == "not-found"
    assert world.machine.run("ls", "/opt/farflung").returncode != 0
    kept = set(world.machine.out("ls", "/var/lib/farflung").split())
    assert {"identity.key", "recovery.key", "genesis", "log", "peers.json"} <= kept
    assert not kept & set(installing.LOST)
    world.machine.out("mkdir", "/opt/farflung")
    world.machine.out("mv", "/opt/aside", "/opt/farflung/venv")
    world.machine.out("/opt/farflung/venv/bin/farflung", "service", "install", timeout=WELL)
    assert world.identity() == identity
    assert world.active()


def test_purging_leaves_nothing(world: World) -> None:
    assert world.script("uninstall", "--purge").returncode == 0
    for path in ("/var/lib/farflung", "/etc/farflung", "/opt/farflung", "/etc/systemd/system/farflung.service"):
        assert world.machine.run("ls", path).returncode != 0, path
    assert world.machine.run("id", "farflung").returncode != 0
    again = world.script("uninstall")
    assert again.returncode == 0
    assert "not installed" in again.stderr
