"""What an idle daemon costs: ``python -m tests.bench.daemon [--json]``.

``start_seconds``      from exec until its port takes connections, the least of several starts
``start_cpu_seconds``  processor time of that start, which a busy machine stretches less
``rss_mb``             resident memory (MiB) with 20 peers connected, at the end
``idle_cpu_percent``   of one core with 20 peers connected, the least of several windows

The daemon is a process of its own, started as an operator does; it is the elector as well. Its 20 peers are real
nodes that share one other process. All keep a public domain's timings (presence 5 s, epoch 10 s), are willing to relay
only, and have nothing to do. The least of several counts, because whatever else the machine does only adds to a figure.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import trio

from node.api.control_client import Unavailable, request
from node.config import Config, write
from node.devnet import fleet
from node.store.data_directory import DataDirectory
from protocol.domain import default_timings, make_genesis
from protocol.identity import peer_id
from tests.protocol.builders import small_domain

PEERS: Final = 20
STARTS: Final = 5
SETTLE: Final = 60.0
"""Seconds that all 21 nodes have to find each other; then the traffic of joining is over."""
WINDOWS: Final = 4
WINDOW: Final = 30.0
"""Seconds of a window: three epochs, six presences of each node."""
TICK: Final = 0.005


def make_directories(folder: Path) -> list[DataDirectory]:
    """The daemon's data directory, which holds the genesis, and its peers', which know its address."""
    founder, *peers = directories = [DataDirectory(folder / f"node-{number}") for number in range(PEERS + 1)]
    ports = fleet.free_ports(PEERS + 1)
    for directory in directories:
        directory.create()
    template = small_domain()
    creator = founder.identity()
    genesis = make_genesis(
        creator,
        name="bench",
        devnet=False,
        electors=(creator.node,),
        validators=(),
        model=template.model,
        tasks=template.tasks,
        recipe=template.recipe,
        timings=default_timings(devnet=False),
        policy=template.policy,
        thresholds=template.thresholds,
    )
    address = f"/ip4/127.0.0.1/tcp/{ports[0]}"
    for directory, port in zip(directories, ports, strict=True):
        directory.save_genesis(genesis)
        bootstrap = () if directory is founder else (f"{address}/p2p/{peer_id(creator.node)}",)
        listen = (f"/ip4/127.0.0.1/tcp/{port}",)
        write(Config(listen=listen, bootstrap=bootstrap, willing=("relay",)), directory.config_file)
    assert len(peers) == PEERS
    return directories


def run_peers(folder: Path) -> None:
    """All peers in this process, for ever: ``python -m tests.bench.daemon --peers FOLDER``."""
    from node import daemon

    logging.getLogger("libp2p").setLevel(logging.CRITICAL)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(1, PEERS + 1):
                directory = DataDirectory(folder / f"node-{number}")
                nursery.start_soon(daemon.main, directory, directory.config())
                await trio.sleep(0.2)

    trio.run(main)


@contextmanager
def running(command: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended with the block; its output goes into a file."""
    with output.open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def daemon_command(directory: DataDirectory) -> list[str]:
    """The operator's command line."""
    return [sys.executable, "-P", "-m", "node.cli.main", "run", "--data-dir", str(directory.path)]


def wait_listening(port: int, process: subprocess.Popen[bytes], seconds: float = 60.0) -> float:
    """When (monotonic time) the port took a connection. Raises ``RuntimeError`` where it does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return time.monotonic()
        time.sleep(TICK)
    raise RuntimeError(f"nothing listens on port {port} after {seconds:.0f} s")


def start_once(directory: DataDirectory, port: int) -> tuple[float, float]:
    """One start, from exec to listening: seconds, and seconds of processor time."""
    began = time.monotonic()
    with running(daemon_command(directory), directory.path / "daemon.log") as process:
        listening = wait_listening(port, process)
        return listening - began, cpu_seconds(process.pid)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, all its threads together (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    """Resident memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:"))) / 1024


def connected(directory: DataDirectory) -> int:
    """How many peers the daemon has now."""
    with suppress(Unavailable):
        return int(trio.run(lambda: request(directory, "status", timeout=10))["peers"])
    return 0


def measure(folder: Path) -> dict[str, float]:
    """All figures, with what they were measured under."""
    os.environ["PYTHONPATH"] = str(Path(fleet.__file__).resolve().parents[1])
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed Farflung is compiled
    founder = make_directories(folder)[0]
    port = int(founder.config().listen[0].rpartition("/")[2])
    starts = [start_once(founder, port) for _ in range(STARTS)]
    peers_command = [sys.executable, "-m", "tests.bench.daemon", "--peers", str(folder)]
    with running(daemon_command(founder), founder.path / "daemon.log") as daemon:
        wait_listening(port, daemon)
        with running(peers_command, folder / "peers.log") as peers:
            time.sleep(SETTLE)
            loads = []
            for _ in range(WINDOWS):
                before, began = cpu_seconds(daemon.pid), time.monotonic()
                time.sleep(WINDOW)
                loads.append((cpu_seconds(daemon.pid) - before) / (time.monotonic() - began) * 100)
            found = connected(founder)
            if found < PEERS or peers.poll() is not None:
                raise RuntimeError(f"the daemon has {found} peers, not {PEERS}: see {folder}")
            return {
                "start_seconds": round(min(seconds for seconds, _ in starts), 2),
                "start_cpu_seconds": round(min(seconds for _, seconds in starts), 2),
                "rss_mb": round(resident_mb(daemon.pid), 1),
                "idle_cpu_percent": round(min(loads), 2),
                "peers": found,
                "load_average": round(os.getloadavg()[0], 2),
            }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what an idle daemon with 20 peers costs (about 4 minutes).")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--peers", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peers is not None:
        run_peers(arguments.peers)
        return
    with tempfile.TemporaryDirectory(prefix="farflung-bench-") as folder:
        found = measure(Path(folder))
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<18} {value}")


if __name__ == "__main__":
    main()
