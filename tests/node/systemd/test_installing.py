"""The unit files and what an installation refuses; a booted systemd has its own tests (``tests/systemd``)."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli import main
from node.errors import UserError
from node.systemd import installing
from node.systemd.installing import ServicePlace, render, system_place, template, user_place

PROGRAM = Path("/opt/farflung/venv/bin/farflung")


def settings(unit: str) -> dict[str, str]:
    """The unit's settings; none stands twice."""
    rows = [line.partition("=") for line in unit.splitlines() if "=" in line and not line.startswith("#")]
    assert len({key for key, _, _ in rows}) == len(rows)
    return {key: value for key, _, value in rows}


def test_the_machines_unit_is_the_file_itself() -> None:
    assert render(template(), system_place(), PROGRAM, 252) == template()


def test_the_unit_keeps_its_promises() -> None:
    unit = settings(template())
    assert unit["Type"] == "notify"
    assert unit["Restart"] == "on-failure"
    assert unit["RestartPreventExitStatus"] == "2"
    assert unit["TimeoutStopSec"] == "30"
    assert unit["KillMode"] == "mixed"
    assert int(unit["WatchdogSec"]) >= 60
    assert unit["StateDirectory"] == "farflung"


@pytest.mark.parametrize(
    "key",
    [
        "MemoryDenyWriteExecute",  # torch compiles at run time
        "PrivateDevices",  # these four hide the GPU
        "DevicePolicy",
        "DeviceAllow",
        "ProtectClock",
        "RestrictNamespaces",  # these break bubblewrap
        "ProtectHostname",
        "PrivateUsers",
        "RestartSteps",  # systemd 252 warns about these
        "RestartMaxDelaySec",
    ],
)
def test_the_unit_sets_nothing_that_breaks_something(key: str) -> None:
    assert key not in settings(template())


def test_a_newer_systemd_gets_its_backoff() -> None:
    unit = settings(render(template(), system_place(), PROGRAM, 254))
    assert (unit["RestartSteps"], unit["RestartMaxDelaySec"]) == ("8", "300")


def test_a_users_unit_has_no_sandbox_and_starts_with_the_login(tmp_path: Path) -> None:
    place = user_place({"HOME": str(tmp_path)})
    assert place.unit == tmp_path / ".config/systemd/user/farflung.service"
    unit = settings(render(template(), place, PROGRAM, 252))
    assert unit["ExecStart"] == f"{PROGRAM} run --data-dir {tmp_path}/.local/share/farflung/node"
    assert unit["WantedBy"] == "default.target"
    assert unit["Type"] == "notify"
    assert unit["RestartPreventExitStatus"] == "2"
    assert not {"User", "Group", "StateDirectory", "ProtectSystem", "CapabilityBoundingSet", "After"} & unit.keys()


def test_a_path_is_one_word_whatever_it_holds() -> None:
    place = replace(system_place(), data=Path('/srv/a b/100%/$HOME/"q"\\'), config=None)
    line = settings(render(template(), place, PROGRAM, 252))["ExecStart"]
    assert line == f'{PROGRAM} run --data-dir "/srv/a b/100%%/$$HOME/\\"q\\"\\\\"'
    with pytest.raises(UserError, match="control characters"):
        render(template(), replace(place, data=Path("/srv/a\nUser=root")), PROGRAM, 252)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("user", [False, True])
def test_systemd_finds_nothing_wrong(tmp_path: Path, user: bool) -> None:
    place = user_place({"HOME": "/home/x y"}) if user else system_place()
    unit = tmp_path / installing.UNIT
    unit.write_text(render(template(), place, Path("/bin/true"), 252))
    words = ["systemd-analyze", *(["--user"] if user else []), "verify", "--man=no", str(unit)]
    environment = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def place_in(folder: Path) -> ServicePlace:
    return ServicePlace(user=True, data=folder / "node", unit=folder / "units" / installing.UNIT)


def test_without_systemd_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no systemd runs on this machine"):
        installing.install(place_in(tmp_path), address=None, yes=True)


def systemctl(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str = "") -> Path:
    """A systemctl that notes its arguments; returns where."""
    notes = folder / "notes"
    (folder / "bin").mkdir()
    for name, text in {
        "systemctl": f'[ "$1" = --version ] && {{ echo "systemd 252 (252)"; exit; }}\necho "$*" >>{notes}\n{body}',
        "journalctl": "echo 'farflung: the port is busy'",
    }.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
    prefix = folder / "venv"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "farflung").write_text("#!/bin/sh\nexit 7\n")
    (prefix / "bin" / "farflung").chmod(0o755)
    return notes


def install(place: ServicePlace, address: str | None = None) -> int:
    """Install the program that ``systemctl`` made beside it."""
    return installing.install(place, address=address, yes=True, prefix=place.data.parent / "venv")


def test_a_node_that_joined_is_started_and_one_that_did_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, place = systemctl(tmp_path, monkeypatch), place_in(tmp_path)
    with pytest.raises(UserError, match="no domain was joined yet"):
        install(place)
    assert install(place, "/ip4/127.0.0.1/tcp/1/p2p/12D3Koo") == 7  # join's own code
    assert not place.unit.exists()
    (place.data / "genesis").touch()
    notes.unlink()
    assert install(place) == 0
    assert str(tmp_path / "venv/bin/farflung") in place.unit.read_text()
    assert notes.read_text().splitlines() == [
        "--user show-environment",
        "--user daemon-reload",
        "--user enable farflung.service",
        "--user restart farflung.service",
    ]


def test_a_service_that_does_not_start_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl(tmp_path, monkeypatch, 'case "$*" in *restart*) exit 1 ;; esac')
    place = place_in(tmp_path)
    place.data.mkdir()
    (place.data / "genesis").touch()
    with pytest.raises(UserError, match="the service did not start: the port is busy"):
        install(place)


@pytest.mark.parametrize("purge", [False, True])
def test_removing_keeps_the_key_and_purging_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, purge: bool
) -> None:
    notes, place = systemctl(tmp_path, monkeypatch), place_in(tmp_path)
    place.unit.parent.mkdir()
    place.unit.write_text(template())
    for name in ("identity.key", "recovery.key", "genesis", "log/log.db", "farflung.toml", *installing.LOST):
        (place.data / name).parent.mkdir(parents=True, exist_ok=True)
        (place.data / name).write_text("")
    installing.remove(place, purge=purge)
    assert "--user disable --now farflung.service" in notes.read_text()
    assert not place.unit.exists()
    if purge:
        assert not place.data.exists()
    else:
        kept = {path.name for path in place.data.iterdir()}
        assert kept == {"identity.key", "recovery.key", "genesis", "log", "farflung.toml"}


def test_a_folder_that_a_daemon_uses_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl(tmp_path, monkeypatch)
    place = place_in(tmp_path)
    place.data.mkdir()
    with (place.data / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="a daemon still runs on it"):
            installing.remove(place, purge=True)
    assert place.data.exists()


def test_the_machines_service_is_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    systemctl(tmp_path, monkeypatch)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match="root's to install"):
        installing.remove(system_place(), purge=True)
    # The command takes a user for one who wants a service of their own.
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main.main(["service", "remove"]) == 0


def test_a_program_that_the_sandbox_hides_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl(tmp_path, monkeypatch)
    prefix = tmp_path / "venv"
    assert installing.command_for(place_in(tmp_path), prefix, (str(tmp_path),)) == prefix / "bin" / "farflung"
    with pytest.raises(UserError, match="which the service cannot see"):
        installing.command_for(system_place(), prefix, (str(tmp_path),))
