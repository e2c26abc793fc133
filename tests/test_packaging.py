"""The wheel: exactly our packages with their data, in nobody's way."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

import pytest

import node

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"node", "proofs", "protocol"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the installed hatchling."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with nothing but the wheel in it."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, capture_output=True, timeout=60
    )
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return environment


def names(wheel: Path) -> list[PurePosixPath]:
    with zipfile.ZipFile(wheel) as archive:
        return [PurePosixPath(name) for name in archive.namelist()]


def test_it_holds_our_packages_and_nothing_else(wheel: Path) -> None:
    top = {name.parts[0] for name in names(wheel)}
    assert top == {*PACKAGES, f"farflung-{node.__version__}.dist-info"}


def test_it_holds_every_module_and_every_data_file(wheel: Path) -> None:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    ours = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert "node/py.typed" in ours
    assert not ours - {str(name) for name in names(wheel)}


@pytest.mark.parametrize(
    "data",
    [
        "node/data/systemd/bootstrap.sh",
        "node/data/systemd/farflung.service",
        "node/telemetry/report.css",
        "node/py.typed",
        "proofs/py.typed",
        "protocol/py.typed",
    ],
)
def test_it_holds_the_data(wheel: Path, data: str) -> None:
    assert PurePosixPath(data) in names(wheel)


def test_it_holds_the_starter_model_within_its_size(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {item.filename: item.file_size for item in archive.infolist()}
    models = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    assert models
    assert all(name.startswith("node/starter/") for name in models)
    assert sum(models.values()) <= 5_000_000


def test_its_metadata_names_licence_and_version(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = f"farflung-{node.__version__}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        licence = archive.read(f"{folder}/licenses/LICENSE").decode()
    assert metadata["Name"] == "farflung"
    assert metadata["Version"] == node.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in licence
    assert (ROOT / "CHANGELOG.md").exists()


def paths_of(distribution: Distribution) -> Iterator[str]:
    for file in distribution.files or ():
        if "__pycache__" not in file.parts:
            yield str(file)


def test_it_shares_no_path_with_another_distribution(installed: Path) -> None:
    (site,) = (installed / "lib").glob("python3*/site-packages")
    (ours,) = (d for d in distributions(path=[str(site)]) if d.metadata["Name"] == "farflung")
    mine = set(paths_of(ours))
    assert any(path.startswith("node/") for path in mine)
    others = [d for d in distributions() if d.metadata["Name"] != "farflung"]
    assert len(others) > 20
    for other in others:
        theirs = set(paths_of(other))
        assert not mine & theirs, other.metadata["Name"]
        # Nor may another one put modules beside ours into a package of ours.
        assert not {PurePosixPath(path).parts[0] for path in theirs} & PACKAGES, other.metadata["Name"]


def test_the_installed_command_tells_its_version(installed: Path) -> None:
    code = "import node, sys; print(node.__version__, node.__file__)"
    done = subprocess.run(
        [str(installed / "bin" / "python"), "-P", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={},
    )
    version, file = done.stdout.split()
    assert version == node.__version__
    assert Path(file).is_relative_to(installed)
    assert (installed / "bin" / "farflung").exists()
