"""A domain of real daemons for the benchmarks: an origin (the trainer), relays and receivers, a process each.

The domain has a public domain's timings. Receivers hold no role: every node follows the weights, whatever it does.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from node.config import Config, write
from node.devnet import fleet as daemons
from node.store.data_directory import DataDirectory
from protocol.domain import Model, default_timings, make_genesis
from protocol.identity import peer_id
from protocol.records import Blob
from tests.bench.links import Links
from tests.bench.payload import Payload
from tests.bench.processes import Child, Children
from tests.protocol.builders import MODEL, POLICY, small_domain

REPOSITORY: Final = Path(__file__).resolve().parents[2]
START: Final = 120.0
"""Seconds until all nodes found each other and have their roles; a public domain takes about forty."""


@dataclass(slots=True)
class Member:
    """One daemon."""

    number: int
    role: str
    directory: DataDirectory
    child: Child = field(init=False)
    id: str = ""


class Fleet:
    """Daemons with roles ``trainer``, ``relay`` or ``none`` each, behind ``links`` or on loopback. The first one is the
    origin, which founds the domain and is its only elector; ``first`` will be its version 0."""

    def __init__(
        self, children: Children, folder: Path, roles: Sequence[str], first: Payload, links: Links | None
    ) -> None:
        self._children = children
        self._links = links
        self._published = -1
        self.members = [Member(n, role, DataDirectory(folder / f"node-{n}")) for n, role in enumerate(roles)]
        self._found(first)
        for member in self.members:
            self._start(member)
        for member in self.members:
            (member.id,) = member.child.expect("ready", START)

    @property
    def origin(self) -> Member:
        return self.members[0]

    @property
    def receivers(self) -> list[Member]:
        """Everybody else."""
        return self.members[1:]

    def _found(self, first: Payload) -> None:
        for member in self.members:
            member.directory.create()
        template, creator = small_domain(), self.origin.directory.identity()
        encoded = first.manifest.encode()
        model = Model(
            MODEL.architecture,
            MODEL.config,
            MODEL.tokenizer,
            Blob(first.manifest.digest, len(encoded)),
            first.manifest.whole,
            MODEL.compute_dtype,
        )
        genesis = make_genesis(
            creator,
            name="bench",
            devnet=False,
            electors=(creator.node,),
            validators=(),
            model=model,
            tasks=template.tasks,
            recipe=template.recipe,
            timings=default_timings(devnet=False),
            policy=replace(POLICY, relays_min=max(1, sum(member.role == "relay" for member in self.members))),
            thresholds=template.thresholds,
        )
        ports = daemons.free_ports(len(self.members))
        hosts = ["127.0.0.1" if self._links is None else self._links.address(m.number) for m in self.members]
        address = f"/ip4/{hosts[0]}/tcp/{ports[0]}/p2p/{peer_id(creator.node)}"
        for member, host, port in zip(self.members, hosts, ports, strict=True):
            member.directory.save_genesis(genesis)
            config = Config(
                name=f"node-{member.number}",
                listen=(f"/ip4/{host}/tcp/{port}",),
                bootstrap=() if member is self.origin else (address,),
                willing=() if member.role == "none" else (member.role,),
            )
            write(config, member.directory.config_file)

    def _start(self, member: Member) -> None:
        inside = [] if self._links is None else self._links.inside(member.number)
        folder = str(member.directory.path)
        command = [sys.executable, "-m", "tests.bench.farnode", folder, member.role, str(len(self.members))]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        member.child = self._children.start(f"node-{member.number}", [*inside, *command], env=env)

    def announce(self, payload: Payload, delta: Path | None = None) -> float:
        """Publish a version, with its ``delta`` (the files move away); when its entry was first known (monotonic
        time). The manifests lie beside the files."""
        self._published += 1
        for member in self.receivers:
            member.child.tell("await", self._published)
        files = [payload.path] if delta is None else [payload.path, delta]
        self.origin.child.tell("publish", *(name for file in files for name in (file.with_suffix(".manifest"), file)))
        return float(self.origin.child.expect("published", 120)[0])

    def arrivals(self, members: Sequence[Member], timeout: float) -> list[float]:
        """When each of these members had the version that was announced last (monotonic time)."""
        return [float(member.child.expect("done", timeout)[0]) for member in members]

    def broadcast(self, payload: Payload, timeout: float) -> float:
        """Seconds from the moment the version was known at all until the last node had it whole and verified."""
        began = self.announce(payload)
        return max(self.arrivals(self.receivers, timeout)) - began

    def verify(self, payload: Payload, members: Sequence[Member]) -> None:
        """Check that what these members say they have is what was published, byte for byte."""
        for member in members:
            path = member.directory.versions / payload.manifest.digest.hex() / "whole.bin"
            if not payload.equals(path):
                raise RuntimeError(f"{path} is not what was published")

    def remove(self) -> None:
        """Delete all data directories."""
        for member in self.members:
            shutil.rmtree(member.directory.path, ignore_errors=True)


class Pings:
    """Round trips of small requests on the control plane between two members."""

    def __init__(self, asking: Member, asked: Member) -> None:
        self._asking = asking
        asking.child.tell("ping", asked.id)

    def take(self) -> list[float]:
        """The round trips (ms) since the last look."""
        self._asking.child.tell("pings")
        (text,) = self._asking.child.expect("pings", 30)
        return [float(one) for one in json.loads(text)]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed; nan of none."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
