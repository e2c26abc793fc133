"""What it takes to give a new version to everybody: ``python -m tests.bench.broadcast [--json] [--only PART,…]``.

``loopback``  1 GiB from one origin over one relay to four receivers, a process a node, on this machine:
              ``speedup_vs_shardcast`` (its seconds over ours; target 3), ``ratio_to_bare_copy`` (seconds of the fastest
              bare copy of that shape that hashes as well, over ours; target 0.8), and ``ping_…_ms``, the round trip
              of a small request between two receivers' daemons, idle and meanwhile (target for the 95th percentile
              meanwhile: twice the idle one or 10 ms)
``netem``     behind links of 100 Mb/s, 80 ms round trip and 0.5 % loss, from one origin to one node:
              ``netem_ratio_to_bound`` (size over rate, over our seconds; target 0.5); with two relays and eight nodes:
              ``netem_last_to_one`` (our seconds to the last node over those to the only one; target below 2),
              ``netem_last_to_bound`` and ``netem_speedup_vs_shardcast`` (ratio of bytes a second to the last node:
              shardcast's run is smaller)
``disturb``   the same links and nodes; one receiver is killed, one has 1 % of the rate, one sends wrong bytes:
              ``disturbed_ratio`` (seconds until the others have it, over those of an undisturbed run; target 1.5)
``delta``     ``tests.bench.delta`` on a model's directory (``--model``): ``delta_bytes_share`` (target 0.01),
              ``delta_entropy_ratio`` (1.5), ``delta_apply_ratio`` (1.5), each the worst of its learning rates
``serving``   from ``step`` to "serving the new version" on a receiver: ``serving_…_ms``

Our time counts from the moment when the ``weights`` entry is known at all until the last node has the version whole and
verified; shardcast's from its publication (luck with its polls and retries makes up to a third of its time). The median
of a few rounds counts, and of the bare copies the best of all. Files lie on tmpfs
(``--files``), because the figures are not to be those of this machine's disk. It takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Final

from tests.bench import bare, baseline, links, payload, serving
from tests.bench import delta as deltas
from tests.bench.fleet import Fleet, Pings, quantile
from tests.bench.links import Links
from tests.bench.payload import Payload
from tests.bench.processes import Children, Missing

MIB: Final = 1 << 20
RECEIVERS: Final = 4
SHAPE: Final = ("trainer", "relay", *(["none"] * RECEIVERS))
PAIR: Final = ("trainer", "none")
FAR: Final = ("trainer", "relay", "relay", *(["none"] * 8))
IDLE: Final = 10.0
"""Seconds of idle pings."""
KILLED_AFTER: Final = 0.3
"""A receiver dies after this share of the undisturbed time."""
Found = dict[str, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the user asked for."""

    folder: Path
    cache: Path
    rounds: int
    size: int
    far_size: int
    shardcast_far_size: int
    model: Path | None


def tell(*words: object) -> None:
    """Progress, to standard error."""
    print(*words, file=sys.stderr, flush=True)


# Loopback


def ours_on_loopback(setting: Setting, source: Payload) -> tuple[float, list[float], list[float]]:
    """Seconds of one broadcast, and round trips (ms) before it and during it. The file is used up, not its twin."""
    copied = Payload(setting.folder / "ours.bin", source.manifest)
    os.link(source.path, copied.path)
    shutil.copy(source.path.with_suffix(".manifest"), copied.path.with_suffix(".manifest"))
    with Children(setting.folder) as children:
        fleet = Fleet(children, setting.folder / "nodes", SHAPE, copied, None)
        try:
            pings = Pings(fleet.members[-1], fleet.members[-2])
            time.sleep(IDLE)
            idle = pings.take()
            seconds = fleet.broadcast(copied, timeout=120)
            busy = pings.take()
            fleet.verify(source, fleet.receivers)
        finally:
            children.end()
            fleet.remove()
    return seconds, idle, busy


def loopback(setting: Setting) -> Found:
    """All of part ``loopback``; the three are measured in turns, so that the machine's moods meet all alike."""
    source = payload.make(setting.folder / "source.bin", setting.size, 0)
    bares: dict[str, float] = {}
    theirs, mine, idle, busy = [], [], [], []
    for number in range(setting.rounds):
        for name, seconds in bare.best(source.path, setting.folder, 1).items():
            bares[name] = min(seconds, bares.get(name, seconds))
        tell(f"round {number + 1}: bare copy", {name: round(seconds, 2) for name, seconds in bares.items()})
        seconds, before, meanwhile = ours_on_loopback(setting, source)
        mine.append(seconds)
        idle += before
        busy += meanwhile
        pings = " → ".join(f"{quantile(some, 0.95):.1f}" for some in (before, meanwhile))
        tell(f"round {number + 1}: ours {seconds:.2f} s, ping p95 {pings} ms")
        try:
            site = baseline.environment(setting.cache)
            theirs.append(baseline.run(site, source.path, setting.folder, 1, RECEIVERS))
        except Missing as why:
            tell("skipped:", why)
        else:
            tell(f"round {number + 1}: shardcast {theirs[-1]:.2f} s")
    source.path.unlink()
    shape, fastest = min(bares.items(), key=lambda item: item[1])
    tell("the fastest bare copy:", shape)
    found = {
        "loopback_mib": setting.size / MIB,
        "ours_seconds": median(mine),
        "bare_seconds": fastest,
        "ratio_to_bare_copy": fastest / median(mine),
        "ping_idle_p50_ms": quantile(idle, 0.5),
        "ping_idle_p95_ms": quantile(idle, 0.95),
        "ping_busy_p50_ms": quantile(busy, 0.5),
        "ping_busy_p95_ms": quantile(busy, 0.95),
    }
    if theirs:
        found |= {"shardcast_seconds": median(theirs), "speedup_vs_shardcast": median(theirs) / median(mine)}
    return found


# Behind links


def netem(setting: Setting) -> Found:
    """All of part ``netem``: version 0 warms the connections up, the next ones are measured."""
    links.require()
    one, last, bound = far(setting, PAIR), far(setting, FAR), links.bound(setting.far_size)
    found: Found = {
        "netem_mib": setting.far_size / MIB,
        "netem_bound_seconds": bound,
        "netem_one_seconds": one,
        "netem_ratio_to_bound": bound / one,
        "netem_last_seconds": last,
        "netem_last_to_one": last / one,
        "netem_last_to_bound": last / bound,
    }
    try:
        site = baseline.environment(setting.cache)
    except Missing as why:
        tell("skipped:", why)
        return found
    source = payload.make(setting.folder / "far.bin", setting.shardcast_far_size, 0)
    with Children(setting.folder) as children, Links(children, setting.cache, len(FAR)) as joined:
        relays = FAR.count("relay")
        theirs = baseline.run(site, source.path, setting.folder, relays, len(FAR) - 1 - relays, joined)
    source.path.unlink()
    tell(f"netem: shardcast {theirs:.2f} s for {setting.shardcast_far_size / MIB:.0f} MiB")
    found["netem_shardcast_mib"] = setting.shardcast_far_size / MIB
    found["netem_shardcast_seconds"] = theirs
    rates = setting.far_size / last, setting.shardcast_far_size / theirs
    found["netem_speedup_vs_shardcast"] = rates[0] / rates[1]
    return found


def far(setting: Setting, shape: Sequence[str]) -> float:
    """Our seconds until the last node of ``shape`` has a version."""
    taken = []
    with Children(setting.folder) as children, Links(children, setting.cache, len(shape)) as joined:
        versions = [make_far(setting, number) for number in range(1 + setting.rounds)]
        fleet = Fleet(children, setting.folder / "nodes", shape, versions[0], joined)
        try:
            fleet.broadcast(versions[0], timeout=240)
            for version in versions[1:]:
                before = joined.carried()
                taken.append(fleet.broadcast(version, timeout=240))
                sent = [(after - then) / setting.far_size for then, after in zip(before, joined.carried(), strict=True)]
                tell(f"netem: ours {taken[-1]:.2f} s; versions sent by each:", *(f"{share:.2f}" for share in sent))
                fleet.verify(version, fleet.receivers)
        finally:
            children.end()
            fleet.remove()
    return median(taken)


def make_far(setting: Setting, number: int) -> Payload:
    """A version for the nodes behind links."""
    return payload.make(setting.folder / f"far-{number}.bin", setting.far_size, number)


def disturb(setting: Setting) -> Found:
    """All of part ``disturb``."""
    links.require()
    with Children(setting.folder) as children, Links(children, setting.cache, len(FAR)) as joined:
        versions = [make_far(setting, number) for number in range(3)]
        fleet = Fleet(children, setting.folder / "nodes", FAR, versions[0], joined)
        try:
            fleet.broadcast(versions[0], timeout=240)
            *healthy, killed, slow, liar = fleet.receivers
            began = fleet.announce(versions[1])
            undisturbed = max(fleet.arrivals(healthy, 240)) - began
            fleet.arrivals([killed, slow, liar], 240)
            tell(f"disturb: undisturbed {undisturbed:.2f} s")
            joined.throttle(slow.number, links.RATE // 100)
            liar.child.tell("spoil")
            began = fleet.announce(versions[2])
            time.sleep(max(0.0, began + KILLED_AFTER * undisturbed - time.monotonic()))
            killed.child.signal(signal.SIGKILL)
            disturbed = max(fleet.arrivals(healthy, 240)) - began
            tell(f"disturb: disturbed {disturbed:.2f} s")
            fleet.verify(versions[2], healthy)
        finally:
            children.end()
            fleet.remove()
    ratio = disturbed / undisturbed
    return {"undisturbed_seconds": undisturbed, "disturbed_seconds": disturbed, "disturbed_ratio": ratio}


def delta(setting: Setting) -> Found:
    """All of part ``delta``: the ratios, and shares a step of eight."""
    if setting.model is None:
        raise Missing("name a model's directory (--model)")
    found = deltas.run(setting.model, threads=len(os.sched_getaffinity(0)), versions=setting.cache / "versions")
    single = {name: value for name, value in found.items() if not isinstance(value, dict)}
    costs = {name: value for name, value in found.items() if isinstance(value, dict)}
    for name, cost in costs.items():
        tell(f"delta: {name}:", {part: float(f"{figure:.4g}") for part, figure in cost.items()})
    eight = max(cost["share"] for name, cost in costs.items() if name.endswith("8 steps"))
    return single | {"delta_bytes_share_8_steps": eight}


def serve(setting: Setting) -> Found:
    """All of part ``serving``."""
    return serving.run(setting.folder, setting.cache, setting.model)


PARTS: Final[dict[str, Callable[[Setting], Found]]] = {
    "loopback": loopback,
    "netem": netem,
    "disturb": disturb,
    "delta": delta,
    "serving": serve,
}


def measure(setting: Setting, parts: list[str]) -> Found:
    """These parts' figures. What cannot run here is said on standard error, and left out."""
    found: Found = {}
    for part in parts:
        try:
            found |= PARTS[part](setting)
        except Missing as why:
            tell(f"{part}: skipped: {why}")
    found["load_average"] = os.getloadavg()[0]
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure broadcasts of a version.", epilog="See the module's text.")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,…", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (default 3)")
    parser.add_argument("--mib", type=int, default=1024, help="size on loopback (default 1024)")
    parser.add_argument("--far-mib", type=int, default=192, help="size behind links (default 192)")
    parser.add_argument("--shardcast-far-mib", type=int, default=2, help="the same for shardcast (default 2)")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory, for the parts that train")
    default = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    parser.add_argument("--files", type=Path, default=default, help=f"where versions lie meanwhile (default {default})")
    cache = Path(tempfile.gettempdir()) / "farflung-bench-broadcast"
    parser.add_argument("--cache", type=Path, default=cache, help=f"for shardcast's environment (default {cache})")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)!r}")
    arguments.cache.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="farflung-bench-", dir=arguments.files) as folder:
        setting = Setting(
            Path(folder),
            arguments.cache,
            arguments.rounds,
            arguments.mib * MIB,
            arguments.far_mib * MIB,
            arguments.shardcast_far_mib * MIB,
            arguments.model,
        )
        found = measure(setting, parts)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<28} {value}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing of it is left")
