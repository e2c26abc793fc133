"""shardcast 0.3.2 from PyPI, in its own virtual environment: the broadcast that ours is compared with.

It is used as its authors do: an ``OriginServer`` that broadcasts a file, ``MiddleNode`` as relay, and receivers that
look for a version every second and fetch it with ``ClientNode``, from the relays only. Shards of 50 MB, ten at once,
as it comes. Its time counts from the moment when the origin has published the version (the cutting into shards and
hashing before that are left out, as ours are) until the last receiver has put the file together and verified it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from node.devnet import fleet
from tests.bench.links import Links
from tests.bench.processes import Child, Children, Missing

VERSION: Final = "0.3.2"
SCRIPT: Final = Path(__file__).with_name("shardcast_node.py")
PORT: Final = 8000
PROBE: Final = 1 << 16
"""Bytes of ``data1.bin``, which every server's folder must have: clients measure the server with it."""


def environment(cache: Path) -> Path:
    """The virtual environment's site-packages, made once. Raises ``Missing``."""
    if shutil.which("wget") is None:
        raise Missing("shardcast fetches with wget, which is not installed")
    venv = cache / f"shardcast-{VERSION}"
    found = list(venv.glob("lib/python*/site-packages/shardcast"))
    if not found:
        shutil.rmtree(venv, ignore_errors=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, capture_output=True)
            pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", f"shardcast=={VERSION}"]
            subprocess.run(pip, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            shutil.rmtree(venv, ignore_errors=True)
            raise Missing(f"shardcast {VERSION} could not be installed: {str(error.stderr).strip()[-200:]}") from None
        found = list(venv.glob("lib/python*/site-packages/shardcast"))
    return found[0].parent


class Broadcast:
    """One broadcast's processes: an origin, relays that fetch from it, receivers that fetch from the relays."""

    def __init__(self, children: Children, site: Path, folder: Path, links: Links | None = None) -> None:
        self._children = children
        self._site = site
        self._folder = folder
        self._links = links
        self._count = 0
        self._names: list[str] = []

    def start(self, role: str, *arguments: str) -> Child:
        """The next node, ready. They start one after the other: its clients all use the same file below /tmp."""
        name = f"shardcast-{role}-{self._count}"
        inside = [] if self._links is None else self._links.inside(self._count)
        self._count += 1
        self._names.append(name)
        home = self._folder / name
        (home / "lib").mkdir(parents=True)
        (home / "data").mkdir()
        # It keeps a temporary file beside its package: a package of its own for every node of this machine.
        (home / "lib" / "shardcast").symlink_to(self._site / "shardcast")
        (home / "data" / "data1.bin").write_bytes(os.urandom(PROBE))
        python = str(self._site.parents[2] / "bin" / "python")
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(home / "lib"), "SHARDCAST_LOG_LEVEL": "INFO"}
        command = [*inside, python, "-P", str(SCRIPT), role, str(home / "data"), *arguments]
        child = self._children.start(name, command, env=env)
        child.expect("ready", 60)
        return child

    def seconds(self, origin: Child, receivers: Sequence[Child], timeout: float) -> float:
        """Seconds from the publication to the last receiver that has it."""
        for child in (*receivers, origin):
            child.tell("go")
        published = float(origin.expect("published", timeout)[0])
        return max(float(child.expect("done", timeout)[0]) for child in receivers) - published

    def remove(self) -> None:
        """Delete what the nodes wrote."""
        for name in self._names:
            shutil.rmtree(self._folder / name, ignore_errors=True)


def run(
    site: Path,
    source: Path,
    folder: Path,
    relays: int,
    receivers: int,
    links: Links | None = None,
    timeout: float = 240,
) -> float:
    """Seconds of one broadcast of ``source``, over loopback or behind ``links`` (which have a node for each)."""
    ports = fleet.free_ports(1 + relays) if links is None else [PORT] * (1 + relays)
    hosts = ["127.0.0.1" if links is None else links.address(number) for number in range(1 + relays)]
    servers = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    with Children(folder) as children:
        broadcast = Broadcast(children, site, folder, links)
        try:
            origin = broadcast.start("origin", str(ports[0]), str(source))
            for number in range(relays):
                broadcast.start("relay", str(ports[1 + number]), servers[0])
            leaves = [broadcast.start("receiver", ",".join(servers[1:])) for _ in range(receivers)]
            return broadcast.seconds(origin, leaves, timeout)
        finally:
            children.end()
            broadcast.remove()
