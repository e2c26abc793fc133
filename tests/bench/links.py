"""Nodes behind links of a rate, a delay and losses: one network namespace a node, joined by ``link.c``.

``tc netem`` is not used. Many kernels are built without it, and where it is there it drops a bundle of up to 44
segments as one packet unless every offload is off, so that one lossy TCP flow looks many times better than it is.
``link.c`` moves single packets between TUN devices and needs a C compiler, root, ``ip`` and ``/dev/net/tun``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.bench.processes import Children, Missing

SOURCE: Final = Path(__file__).with_name("link.c")
PREFIX: Final = "farflung-bench-"
SPACES: Final = Path("/run/netns")
RATE: Final = 100_000_000
"""Bits a second, each way."""
ROUND_TRIP: Final = 0.08
LOSS: Final = 0.005
SEED: Final = 5
CONGESTION: Final = "cubic"
ALLOWED: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
"""What the nodes' kernels use unless a program asks for something else: the default of nearly every machine."""


def require() -> None:
    """Raise ``Missing`` where links cannot be made."""
    if os.geteuid() != 0:
        raise Missing("network namespaces need root")
    for program in ("ip", "cc"):
        if shutil.which(program) is None:
            raise Missing(f"{program} is not installed")
    if not Path("/dev/net/tun").exists():
        raise Missing("this kernel has no /dev/net/tun")


def compiled(cache: Path) -> Path:
    """The program, built once for its source."""
    program = cache / f"link-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if not program.exists():
        unfinished = program.with_suffix(".part")
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", str(unfinished), str(SOURCE)], check=True)
        unfinished.rename(program)
    return program


def clear() -> None:
    """Delete the namespaces of runs that were killed."""
    for space in SPACES.glob(f"{PREFIX}*"):
        pid = space.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "del", space.name], check=False, capture_output=True)


class Links:
    """``count`` nodes, all joined; leaving the block removes everything."""

    def __init__(
        self,
        children: Children,
        cache: Path,
        count: int,
        *,
        rate: int = RATE,
        trip: float = ROUND_TRIP,
        loss: float = LOSS,
    ) -> None:
        self._children = children
        self._command = [str(compiled(cache)), str(round(trip / 2 * 1e6)), str(round(loss * 1e6)), str(SEED), str(rate)]
        self._allowed = ALLOWED.read_text()
        self._names = [f"{PREFIX}{os.getpid()}-{number}" for number in range(count)]

    def address(self, number: int) -> str:
        """The node's IPv4 address."""
        return f"10.77.0.{number + 1}"

    def inside(self, number: int) -> list[str]:
        """What goes before a command that shall run behind the node's link."""
        return ["ip", "netns", "exec", self._names[number]]

    def throttle(self, number: int, bits: int) -> None:
        """Another rate for one node's link, from now on."""
        self._link.tell("rate", number, bits)

    def carried(self) -> list[int]:
        """Bytes that each node's uplink has carried so far, with all headers."""
        self._link.tell("sent")
        return [int(word) for word in self._link.expect("sent", 10)]

    def __enter__(self) -> Self:
        clear()
        try:
            if CONGESTION not in self._allowed.split():
                # Namespaces may have no other default than these; put back at the end.
                ALLOWED.write_text(f"{self._allowed.strip()} {CONGESTION}")
            for name in self._names:
                _ip("netns", "add", name)
            spaces = [str(SPACES / name) for name in self._names]
            self._link = self._children.start("link", [*self._command, *spaces])
            self._link.expect("ready", 10)
            for number, name in enumerate(self._names):
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "link0")
                _ip("-n", name, "link", "set", "link0", "mtu", "1500", "txqueuelen", "4000", "up")
                _ip("netns", "exec", name, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={CONGESTION}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._children.end()
        if ALLOWED.read_text() != self._allowed:
            ALLOWED.write_text(self._allowed)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    result = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if result.returncode:
        raise Missing(f"ip {' '.join(words)}: {result.stderr.strip()}")


def bound(size: int, rate: int = RATE) -> float:
    """Seconds that ``size`` bytes take at the links' rate, without headers, delay and losses."""
    return size * 8 / rate
