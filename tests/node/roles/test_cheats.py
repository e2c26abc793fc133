"""How a devnet's cheats cheat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import trio
import trio.testing

from node import config
from node.roles import cheats
from protocol.weights.manifest import Manifest
from tests.node.fake_children import WHOLE_0, Faults
from tests.node.fakes import open_cluster


def test_the_configuration_knows_the_same_cheats() -> None:
    assert set(config.CHEATS) == {"", *cheats.CHEATS}


async def test_noise_of_five_percent_of_each_tensors_deviation(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    small = generator.normal(3.0, 0.01, 10_000).astype("<f4")
    large = generator.normal(-2.0, 10.0, (100, 50)).astype("<f4")
    data = small.tobytes() + large.tobytes()
    manifest = Manifest.of_file([("a", "F32", (10_000,)), ("b", "F32", (100, 50))], data, 1)
    (tmp_path / "manifest").write_bytes(manifest.encode())
    (tmp_path / "whole").write_bytes(data)
    path = await cheats.perturbed(tmp_path, bytes(32), tmp_path / "manifest", tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == data
    values = np.frombuffer(path.read_bytes(), "<f4")
    for original, made in ((small, values[:10_000]), (large.ravel(), values[10_000:])):
        noise = made - original
        assert abs(noise.std() / original.std() - 0.05) < 0.003
        assert abs(noise.mean()) < 0.1 * noise.std()


async def test_one_file_a_version_and_no_more(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", i="inference")
        running = cluster.running["t"]
        folder, paths = running.node.directory.work, running.weights.held.paths
        path = await cheats.perturbed(folder, version.id, *paths(version.id))
        made = path.stat().st_mtime_ns
        assert path.read_bytes() != WHOLE_0
        assert len(path.read_bytes()) == len(WHOLE_0)
        assert await cheats.perturbed(folder, version.id, *paths(version.id)) == path
        assert path.stat().st_mtime_ns == made
        newer = await cluster.announce("t", np.linspace(-2, 2, 16, dtype="<f4").tobytes(), version)
        other = await cheats.perturbed(folder, newer.id, *paths(newer.id))
        assert list(folder.glob("cheat-*")) == [other]
