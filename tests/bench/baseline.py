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
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.bench.processes import Child, Children

VERSION: Final = "0.3.2"
SCRIPT: Final = Path(__file__).with_name("shardcast_node.py")
PORT: Final = 8000
PROBE: Final = 1 << 20
"""Bytes of ``data1.bin``, which every server's folder must have: clients measure the server with it."""


class Missing(Exception):
    """The baseline cannot run on this machine; says why."""


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
    """The processes of one broadcast; ``inside`` prefixes a node's command, to run it in a network namespace."""

    def __init__(self, children: Children, site: Path, folder: Path) -> None:
        self.children = children
        self.site = site
        self.folder = folder

    def start(self, name: str, arguments: Sequence[str], inside: Sequence[str] = ()) -> Child:
        """One node, ready. They start one after the other: its clients all use the same file below /tmp."""
        home = self.folder / name
        (home / "lib").mkdir(parents=True)
        (home / "data").mkdir()
        # It keeps a temporary file beside its package: a package of its own for every node of this machine.
        (home / "lib" / "shardcast").symlink_to(self.site / "shardcast")
        with (home / "data" / "data1.bin").open("wb") as probe:
            probe.write(os.urandom(PROBE))
        role, *rest = arguments
        python = str(self.site.parents[2] / "bin" / "python")
        command = [*inside, python, "-P", str(SCRIPT), role, str(home / "data"), *rest]
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(home / "lib"), "SHARDCAST_LOG_LEVEL": "INFO"}
        child = self.children.start(name, command, env=env)
        child.expect("ready", 60)
        return child

    def run(self, origin: Child, receivers: Sequence[Child], timeout: float) -> float:
        """Seconds from the publication to the last receiver that has it."""
        for child in (*receivers, origin):
            child.tell("go")
        published = float(origin.expect("published", timeout)[0])
        return max(float(child.expect("done", timeout)[0]) for child in receivers) - published


def loopback(site: Path, source: Path, folder: Path, ports: Sequence[int], receivers: int = 4) -> float:
    """Seconds of one broadcast over loopback: one origin, one relay, four receivers."""
    first, second = ports
    with Children(folder) as children:
        broadcast = Broadcast(children, site, folder)
        origin = broadcast.start("origin", ["origin", str(first), str(source)])
        broadcast.start("relay", ["relay", str(second), f"127.0.0.1:{first}"])
        servers = f"127.0.0.1:{second}"
        leaves = [broadcast.start(f"receiver-{number}", ["receiver", servers]) for number in range(receivers)]
        try:
            return broadcast.run(origin, leaves, timeout=180)
        finally:
            for child in children.all:
                child.end()
            with suppress(OSError):
                for name in ("origin", "relay", *(f"receiver-{number}" for number in range(receivers))):
                    shutil.rmtree(folder / name)
