"""Preparing a devnet: what was asked for, and every node's data directory with key, ports and configuration."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from node.config import CHEATS, WILLING, BulkConfig, Config, DevnetConfig, TrackingConfig, TrainerConfig, write
from node.devnet import fleet
from node.devnet.fleet import PACE, Member, Pace, daemon_command
from node.errors import UserError, os_errors
from node.store.data_directory import DataDirectory
from protocol.identity import peer_id

MIN_NODES: Final = 4
"""Below it one of the four roles would stay empty."""
ROOM: Final = 400 << 20
"""Bytes free without which no devnet starts: twice what a daemon asks for."""
MAX_NODES: Final = 64


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for. ``tasks`` is None for the starter model's own mix; ``domain`` is a
    ``domain.toml`` to try out instead of the starter model, and ``engine`` what all nodes generate with. The trainer
    evaluates every so many versions (0: none); ``tensorboard`` has all nodes write event files."""

    folder: Path
    nodes: int = 5
    steps: int = 60
    cheats: tuple[str, ...] = ()
    tasks: str | None = None
    seed: int | None = None
    keep_running: bool = False
    domain: Path | None = None
    engine: str = "auto"
    threads: int = 1
    eval_every: int = 0
    tensorboard: bool = False

    def check(self) -> None:
        """Raise ``UserError`` for what cannot work."""
        if not MIN_NODES <= self.nodes <= MAX_NODES:
            raise UserError(f"--nodes {self.nodes}: a devnet has {MIN_NODES} to {MAX_NODES} nodes")
        if self.steps < 1:
            raise UserError(f"--steps {self.steps}: at least one step is needed")
        if self.eval_every < 0:
            raise UserError(f"--eval-every {self.eval_every}: expected 1 or more, or 0 for no evaluations")
        if self.domain is not None and self.tasks is not None:
            raise UserError("--tasks: the tasks stand in the file of --domain", "name one of the two")
        if (unknown := next((cheat for cheat in self.cheats if cheat not in CHEATS or not cheat), None)) is not None:
            raise UserError(f"--cheat {unknown}: known are {', '.join(filter(None, CHEATS))}")


def make_folder(folder: Path) -> None:
    """Make the run's folder; one that holds anything is refused."""
    with os_errors(folder, "cannot be used", "name another folder with --dir"):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: a file of that name is there", "name another folder with --dir")
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder}: the folder is not empty", "name a new one with --dir")
        if (free := shutil.disk_usage(folder).free) < ROOM:
            folder.rmdir()
            raise UserError(
                f"{folder}: the disk has {free / 1e6:.0f} MB free, a devnet needs {ROOM / 1e6:.0f} MB",
                "free some room or name a folder on another disk with --dir",
            )


def prepare(
    options: Options, command: Callable[[DataDirectory], list[str]] = daemon_command, pace: Pace = PACE
) -> list[Member]:
    """Write every node's data directory but for the genesis; returns the members, node 1 first."""
    names = [f"node-{number}" for number in range(1, options.nodes + 1)]
    cheats: list[str] = [""] * options.nodes
    for cheat in options.cheats:
        count = cheats.count(cheat)
        names.append(f"cheat-{cheat}" + (f"-{count + 1}" if count else ""))
        cheats.append(cheat)
    members: list[Member] = []
    for name, cheat, port in zip(names, cheats, fleet.free_ports(len(names)), strict=True):
        directory = DataDirectory(options.folder / name)
        directory.create()
        if options.seed is not None:
            _derive_key(directory, options.seed, name)
        listen = f"/ip4/127.0.0.1/tcp/{port}"
        config = Config(
            name=name,
            listen=(listen,),
            bootstrap=(members[0].address,) if members else (),
            willing=("inference",) if cheat else WILLING,
            engine=options.engine,
            threads=options.threads,
            # Of any port: the one that follows from another node's may be a third one's.
            bulk=BulkConfig(listen=("/ip4/127.0.0.1/tcp/0",)),
            trainer=TrainerConfig(eval_every=options.eval_every),
            tracking=TrackingConfig(tensorboard=options.tensorboard),
            devnet=DevnetConfig(cheat=cheat, pause_at_step=options.steps),
        )
        write(config, directory.config_file)
        address = f"{listen}/p2p/{peer_id(directory.identity().node)}"
        members.append(Member(name, directory, address, command(directory), pace))
    return members


def _derive_key(directory: DataDirectory, seed: int, name: str) -> None:
    """With ``--seed`` the keys are not secret: they follow from the seed, so that a run's node ids can be repeated."""
    key = sha256(b"farflung/devnet-key/v1\0" + f"{seed}/{name}".encode()).digest()
    descriptor = os.open(directory.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)


def default_folder() -> Path:
    """``devnet/<UTC time>`` below the working directory."""
    return Path("devnet") / time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
