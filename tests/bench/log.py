"""What the log costs: ``python -m tests.bench.log [--json]``.

``append_ratio``     rate at which a batch is verified and appended to the database, over the rate of bare PyNaCl
                     verification of the same bytes on one core; target: at least 0.7
``sync_ratio``       first sync of 100,000 entries from a peer's process over loopback, over the time that bare
                     verification of all their signatures (a verdict has two) takes on one core; target: at most 1.5
``open_seconds``     from exec of a daemon with 1,000,000 entries until it answers on its control socket; target: 2
``open_rss_mb``      its resident memory (MiB) then; target: 200
``handshake_bytes``  what two nodes with equal logs of 10,000 authors exchange on the stream; target: 1,024

The limits are measured beside what they limit, round by round, and the best round counts: whatever else the machine
does only slows things down, and several threads more than one. The log of a million entries takes minutes to make; it
is kept in the temporary folder (``--cache``) for the next time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import trio
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from node.api.control_client import Unavailable, request
from node.config import Config
from node.config import write as write_config
from node.log.log_opening import load
from node.log.replicated_log import LogService
from node.log.replication import LogSync
from node.log.signature_checkers import open_checkers
from node.net.host import Network, open_network
from node.store.data_directory import DataDirectory
from node.store.log_store import open_log_store
from protocol import identity
from protocol.credit import fold_state, history, lineage, snapshot
from protocol.credit.ledger import Ledger
from protocol.log import amendment, quorum
from protocol.log.entry import Entry
from protocol.log.entry import decode as decode_entry
from protocol.log.heads import RangeRequest
from protocol.log.replica import Replica
from protocol.records import Join, Role, Verdict
from tests.bench import biglog
from tests.bench.biglog import DOMAIN, ELECTOR, Feed
from tests.bench.daemon import daemon_command, resident_mb, running
from tests.protocol.builders import key, small_genesis

ROUNDS: Final = 3
BATCH_AUTHORS: Final = 100
BATCH_EACH: Final = 200
BARE: Final = 4000
"""Signatures of which a round's bare rate is taken, before and behind what it is compared with."""

REPOSITORY: Final = Path(biglog.__file__).resolve().parents[2]
MADE_BY: Final = (biglog, amendment, fold_state, history, lineage, quorum, snapshot)
"""What a made log depends on."""
GENERATOR: Final = hashlib.sha256(b"".join(Path(str(one.__file__)).read_bytes() for one in MADE_BY)).hexdigest()[:12]


def bare_seconds(entries: Sequence[Entry]) -> float:
    """Seconds that bare verification of one of these takes on one core: of all the signatures that it bears."""
    some = entries[:: max(1, len(entries) // BARE)]
    signed = [(entry.author, identity.ENTRY + entry.body, entry.signature) for entry in some]
    for entry in some:
        if isinstance(entry.payload, Verdict):
            signed.append((entry.author, identity.DRAW + bytes(64), entry.payload.draw))
    began = time.perf_counter()
    for author, message, signature in signed:
        # The draws' messages are not at hand; a signature that is wrong takes as long.
        with suppress(BadSignatureError):
            VerifyKey(author).verify(message, signature)
    return (time.perf_counter() - began) / len(some)


def batch() -> list[Entry]:
    """Entries of many authors that need nothing before them."""
    feeds = [Feed(key(f"author {number}"), DOMAIN.id) for number in range(BATCH_AUTHORS)]
    entries = [feed.say(DOMAIN.id, Join(bytes(32), "farflung/bench", "node")) for feed in feeds]
    for number in range(BATCH_EACH - 1):
        entries += [feed.say(DOMAIN.id, Role("inference" if number % 2 else "none")) for feed in feeds]
    return entries


async def append_ratio(folder: Path) -> float:
    """The rate of ``LogService.receive``, as a share of the bare rate: the best of a few rounds."""
    entries = batch()
    data = [entry.encode() for entry in entries]
    ratios = []
    for number in range(ROUNDS):
        bare = bare_seconds(entries)
        path = folder / f"append-{number}.db"
        async with open_log_store(path, DOMAIN) as store, open_checkers() as checkers:
            service = LogService(key("reader"), Replica(DOMAIN), store, fresh=True, checking=checkers.check)
            began = time.perf_counter()
            received = await service.intake.receive(entries=data)
            whole = (time.perf_counter() - began) / len(entries)
            assert received.added == len(entries), received.errors
        ratios.append((bare + bare_seconds(entries)) / 2 / whole)
    return max(ratios)


@asynccontextmanager
async def node(path: Path, name: str) -> AsyncIterator[tuple[LogSync, Network]]:
    """A log with its network, that answers but asks for nothing by itself."""
    async with (
        open_log_store(path, DOMAIN) as store,
        open_checkers() as checkers,
        open_network(key(name), listen=["/ip4/127.0.0.1/tcp/0"], domain_tag="bench") as network,
    ):
        log: Ledger = await load(store, DOMAIN)
        sync = LogSync(LogService(key(name), log, store, checking=checkers.check), network, interval=3600)
        network.serve(sync.protocol, sync.handle, max_request=16 << 10)
        yield sync, network


def serve(path: Path) -> None:
    """Serve a log in this process until it is ended; its address goes to standard output."""

    async def main() -> None:
        async with node(path, "server") as (_, network):
            print(network.addresses[0], flush=True)
            await trio.sleep_forever()

    trio.run(main)


async def sync_ratio(source: Path, folder: Path) -> tuple[float, float, int]:
    """(ratio, seconds, entries) of the best round."""
    command = [sys.executable, "-m", "tests.bench.log", "--serve", str(source)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220  nothing runs yet
    assert server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        found = []
        for number in range(ROUNDS):
            async with node(folder / f"sync-{number}.db", "client") as (sync, network):
                connected = trio.Event()
                network.on_connect(partial(_set, connected))
                await network.add_peer(address)
                with trio.fail_after(30):
                    await connected.wait()
                began = time.perf_counter()
                result = await sync.sync_with(key("server").node)
                seconds = time.perf_counter() - began
                assert not result.errors
                total = sum(head.seq + 1 for head in sync.service.replica.heads.values())
                stored = await sync.service.store.ranges(_some(sync.service.replica), 1 << 30)
                bare = bare_seconds([decode_entry(data, verify=False) for some in stored for data in some])
                found.append((seconds / total / bare, seconds, total))
        return min(found)
    finally:
        server.terminate()
        server.wait()


def _set(event: trio.Event, peer: bytes) -> None:
    event.set()


def _some(replica: Replica) -> list[RangeRequest]:
    return [RangeRequest(head.author, 0, min(head.seq, 99)) for head in replica.heads.values()]


async def handshake_bytes(folder: Path, authors: int) -> int:
    """Bytes of one comparison of equal logs over a real stream, both ways."""
    feeds = [Feed(key(f"author {number}"), DOMAIN.id) for number in range(authors)]
    feeds += [Feed(key(name), DOMAIN.id) for name in ("one", "other")]
    entries = [feed.say(DOMAIN.id, Join(bytes(32), "farflung/bench", "node")) for feed in feeds]
    async with node(folder / "one.db", "one") as (one, first), node(folder / "other.db", "other") as (other, second):
        for sync in (one, other):
            received = await sync.service.intake.receive(entries=[entry.encode() for entry in entries])
            assert received.added == len(entries)
        connected = trio.Event()
        first.on_connect(lambda _: connected.set())
        await first.add_peer(second.addresses[0])
        with trio.fail_after(30):
            await connected.wait()
        before = first.counts.get(one.protocol)
        sent, got = (0, 0) if before is None else (before.sent, before.received)
        await one.sync_with(key("other").node)
        count = first.counts[one.protocol]
        # The names of the protocols, which the count leaves out: two lines each way, each with its length.
        lines = 2 * (len("/multistream/1.0.0\n") + 1 + len(one.protocol) + 2)
        return count.sent - sent + count.received - got + lines


def open_once(directory: DataDirectory) -> tuple[float, float]:
    """(seconds from exec until a daemon answers, its resident memory in MiB then)."""

    async def answers(process: subprocess.Popen[bytes]) -> float:
        while process.poll() is None:
            try:
                await request(directory, "status", timeout=10)
            except Unavailable:
                await trio.sleep(0.01)
            else:
                return time.monotonic()
        raise RuntimeError(f"the daemon ended: see {directory.path}/daemon.log")

    began = time.monotonic()
    with running(daemon_command(directory), directory.path / "daemon.log") as process:
        ready = trio.run(answers, process)
        return ready - began, resident_mb(process.pid)


def open_figures(database: Path, folder: Path) -> tuple[float, float]:
    """The least of a few openings of a daemon whose log is ``database``."""
    directory = DataDirectory(folder / "node")
    directory.create()
    directory.import_keys(key(ELECTOR).seed, None, 1)
    directory.save_genesis(small_genesis())
    write_config(Config(listen=("/ip4/127.0.0.1/tcp/0",), willing=("relay",)), directory.config_file)
    directory.log_database.parent.mkdir(exist_ok=True)
    shutil.copy(database, directory.log_database)
    found = [open_once(directory) for _ in range(ROUNDS)]
    return min(seconds for seconds, _ in found), max(mb for _, mb in found)


def cached(cache: Path, name: str, make: Callable[[Path], object]) -> Path:
    """A file that is made once."""
    path = cache / f"{name}-{GENERATOR}.db"
    if not path.exists():
        unfinished = path.with_suffix(".part")
        unfinished.unlink(missing_ok=True)
        make(unfinished)
        unfinished.rename(path)
    return path


def measure(folder: Path, cache: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """All figures, with what they were measured under."""
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed Farflung is compiled
    found: dict[str, float] = {}
    found["append_ratio"] = round(trio.run(append_ratio, folder), 3)
    small = cached(cache, f"log-{arguments.sync}", lambda path: biglog.write(path, arguments.sync))
    ratio, seconds, entries = trio.run(sync_ratio, small, folder)
    found["sync_ratio"] = round(ratio, 3)
    found["sync_seconds"], found["sync_entries"] = round(seconds, 2), entries
    large = cached(cache, f"log-{arguments.open}", lambda path: biglog.write(path, arguments.open, told=_tell))
    opened, rss = open_figures(large, folder)
    found["open_seconds"], found["open_rss_mb"] = round(opened, 2), round(rss, 1)
    found["handshake_bytes"] = trio.run(handshake_bytes, folder, arguments.authors)
    found["load_average"] = round(os.getloadavg()[0], 2)
    return found


def _tell(entries: int) -> None:
    if sys.stderr.isatty():
        print(f"\rmaking a log: {entries} entries", end="", file=sys.stderr)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what the log costs (some minutes, the first time more).")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--sync", type=int, default=100_000, metavar="N", help="entries of the first sync")
    parser.add_argument("--open", type=int, default=1_000_000, metavar="N", help="entries of the log that is opened")
    parser.add_argument("--authors", type=int, default=10_000, metavar="N", help="authors of the handshake")
    cache = Path(tempfile.gettempdir()) / "farflung-bench-log"
    parser.add_argument("--cache", type=Path, default=cache, help=f"where made logs are kept (default: {cache})")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    arguments.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="farflung-bench-") as folder:
        found = measure(Path(folder), arguments.cache, arguments)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<18} {value}")


if __name__ == "__main__":
    main()
