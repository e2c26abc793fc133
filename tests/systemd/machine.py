"""A whole Debian machine in a container: made once with debootstrap, kept in the user's cache, booted with its systemd.

Nothing here is Farflung's. The machine shares this one's network; its root is a layer over the cached one, so that no
test finds what another left.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email.parser import Parser
from pathlib import Path

import pytest

SUITE = "bookworm"
PACKAGES = (
    "systemd systemd-sysv dbus dbus-user-session libpam-systemd python3 python3-venv python3-dev gcc libgmp-dev "
    "bubblewrap ca-certificates procps"
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def cache() -> Path:
    """Where the root and the wheels are kept between runs."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farflung-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def mirror() -> str:
    """The Debian mirror that this machine itself is configured for."""
    words = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(CODENAME) $(SITE)", "Created-By: Packages"]
    rows = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    for row in rows:
        origin, codename, site = row.split(" ", 2)
        if (origin, codename) == ("Debian", SUITE):
            return site
    pytest.skip(f"apt names no mirror of Debian {SUITE}")


def debian() -> Path:
    """The machine's root as debootstrap made it; takes minutes the first time."""
    root = cache() / f"debian-{hashlib.sha256(PACKAGES.encode()).hexdigest()[:8]}"
    if not root.exists():
        new = root.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        include = ",".join(PACKAGES.split())
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={include}", SUITE, str(new), mirror()],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=1500,
        )
        new.rename(root)
    return root


def wheelhouse(wheel: Path, torch: str) -> Path:
    """All wheels that ``wheel`` needs, from the index that pip is configured for; fetched once for its requirements."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        needs = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    needs = [need for need in needs if "extra ==" not in need and not need.startswith("torch")]
    folder = cache() / f"wheels-{hashlib.sha256(repr((needs, torch)).encode()).hexdigest()[:8]}"
    if not folder.exists():
        new = folder.with_suffix(".new")
        words = [sys.executable, "-m", "pip", "wheel", "-q", "-w", str(new), "-f", str(new), f"torch=={torch}", *needs]
        subprocess.run(words, check=True, capture_output=True, timeout=900)
        new.rename(folder)
    return folder


@contextmanager
def layered(below: Path, folder: Path) -> Iterator[Path]:
    """A root that shows ``below`` and keeps what is written for itself."""
    upper, work, root = (folder / name for name in ("upper", "work", "root"))
    for path in (upper, work, root):
        path.mkdir()
    options = f"lowerdir={below},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], check=True, timeout=30)
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True, timeout=30)


def wait(what: str, ready: Callable[[], object], seconds: float) -> None:
    """Wait until ``ready`` returns something true; fail by name."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


class Machine:
    """A booted machine."""

    def __init__(self, root: Path, console: Path, binds: Sequence[tuple[Path, str]]) -> None:
        self._console = console
        words = ["systemd-nspawn", "-q", "-D", str(root), "--boot", "--register=no", "--keep-unit", "--console=pipe"]
        self._words = [*words, *(f"--bind-ro={outside}:{inside}" for outside, inside in binds)]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._console.open("ab") as output:
            return subprocess.Popen(self._words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def init(self) -> int | None:
        """The machine's process 1, as this machine numbers it; None where it does not run."""
        if self.process.poll() is not None:
            return None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            with suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text() == "systemd\n":
                    return int(child)
        return None

    def run(
        self, *words: str, user: str = "", stdin: str | None = None, timeout: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine."""
        init = self.init()
        assert init is not None, "the machine does not run"
        environment = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root", **environment}
        if user:
            environment["HOME"] = f"/home/{user}"
            words = ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *words)
        settings = [f"{key}={value}" for key, value in environment.items()]
        return subprocess.run(
            ["nsenter", "-t", str(init), "-a", "-r", "-w", "env", "-i", *settings, *words],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def out(
        self, *words: str, user: str = "", stdin: str | None = None, timeout: float = 60, **environment: str
    ) -> str:
        """What a command prints; it must succeed."""
        done = self.run(*words, user=user, stdin=stdin, timeout=timeout, **environment)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def is_up(self) -> bool:
        """Whether the boot is over."""
        return self.init() is not None and self.run("systemctl", "is-system-running").stdout.strip() in (
            "running",
            "degraded",
        )

    def reboot(self) -> None:
        """Shut down and boot again; returns when that is over. (nspawn's own reboot wants a /run in memory.)"""
        self.off()
        self.process = self._start()
        wait("the boot after a shutdown", self.is_up, 90)

    def off(self) -> None:
        """Power off, within half a minute."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("systemctl", "poweroff", timeout=10)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            init = self.init()
            if init is not None:
                os.kill(init, signal.SIGKILL)
            self.process.kill()
            self.process.wait(10)


@contextmanager
def booted(folder: Path, binds: Sequence[tuple[Path, str]]) -> Iterator[Machine]:
    """A machine, fresh, for a ``with`` block. ``binds`` are folders of this machine and where that one has them."""
    with layered(debian(), folder) as root:
        machine = Machine(root, folder / "console", binds)
        try:
            wait("the boot", machine.is_up, 90)
            yield machine
        finally:
            machine.off()
