"""A node's data directory: its key, its lock, its counters and the paths of everything else.

::

    farflung.toml   the configuration            identity.key   32 secret bytes, mode 0600
    recovery.key    32 secret bytes, mode 0600   boot           how often the daemon was started
    recovery.pub    in its place once forgotten  genesis        the domain's signed genesis
    peers.json      addresses of known peers     lock           flock of the running daemon, holds its pid
    control.sock    the running daemon's socket  log/log.db     the replicated log
    blobs/          content-addressed files      versions/      weights
    trainer/        the trainer's checkpoints   work/          scratch of children, emptied at each start
    metrics.jsonl   what the node measures
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from node import config
from node.errors import UserError, os_errors
from node.net.address_text import MAX_ADDRESSES, address_problem
from node.store.durable_files import read_named, sync_directory, write_atomic, write_synced
from protocol.constants import MAX_GENESIS_BYTES
from protocol.errors import PeerError
from protocol.identity import Identity, node_id

logger = logging.getLogger(__name__)

MAX_KNOWN_PEERS: Final = 1024
"""Peers kept in ``peers.json``: plenty for a start, little to read."""

MAX_BOOT: Final = 2**63 - 1
"""The highest number of a start: the greatest integer that a presence can carry."""


class DataDirectory:
    """The paths and small files of one node. Every method raises ``UserError`` for what the operator must mend."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.config_file = self.path / "farflung.toml"
        self.key_file = self.path / "identity.key"
        self.recovery_file = self.path / "recovery.key"
        self.recovery_public_file = self.path / "recovery.pub"
        self.genesis_file = self.path / "genesis"
        self.boot_file = self.path / "boot"
        self.peers_file = self.path / "peers.json"
        self.invitation_file = self.path / "invitation.key"
        self.lock_file = self.path / "lock"
        self.control_socket = self.path / "control.sock"
        self.log = self.path / "log"
        self.log_database = self.log / "log.db"
        self.blobs = self.path / "blobs"
        self.versions = self.path / "versions"
        self.trainer = self.path / "trainer"
        self.work = self.path / "work"

    def exists(self) -> bool:
        """Whether a node ever lived here."""
        return self.key_file.exists()

    def written(self) -> tuple[Path, ...]:
        """What a daemon writes to, and into; not all of it need be there."""
        folders = (self.log, self.blobs, self.versions, self.trainer, self.work)
        return (*folders, self.lock_file, self.boot_file, self.peers_file, self.log_database)

    def create(self) -> None:
        """Make the folders that are missing, for this user only."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.log, self.blobs, self.versions, self.trainer, self.work):
                folder.mkdir(mode=0o700, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"{error.filename or self.path}: a file stands where a folder belongs", "choose another folder"
            ) from None
        except OSError as error:
            raise UserError(
                f"{error.filename or self.path}: cannot be made ({error.strerror})", "choose a folder you own"
            ) from None

    def config(self) -> config.Config:
        """``farflung.toml``, or the defaults where there is none."""
        return config.load(self.config_file)

    # The key

    def identity(self) -> Identity:
        """The node's key; made on the first call."""
        if not os.path.lexists(self.key_file):
            self._make_key(self.key_file)
        return self.read_identity()

    @property
    def recovery_forgotten(self) -> bool:
        """Whether the recovery key was removed from here on purpose."""
        return not os.path.lexists(self.recovery_file) and os.path.lexists(self.recovery_public_file)

    def make_recovery(self) -> bool:
        """Make the recovery key where the node never had one; whether it was made now."""
        made = not os.path.lexists(self.recovery_file) and not self.recovery_forgotten
        if made:
            self._make_key(self.recovery_file)
        return made

    def recovery(self) -> Identity:
        """The recovery key, while it is kept here."""
        if self.recovery_forgotten:
            raise UserError(
                f"{self.recovery_file}: the recovery key was forgotten here", "it exists only as the words written down"
            )
        return self._read_key(self.recovery_file)

    def recovery_public(self) -> bytes:
        """The public half of the recovery key, to which the feed's ``join`` commits; the key is made where there never
        was one."""
        self.make_recovery()
        if os.path.lexists(self.recovery_file):
            return self.recovery().node
        public = read_named(self.recovery_public_file, 32, "make it readable for this user")
        if len(public) != 32:
            raise UserError(f"{self.recovery_public_file}: it has not 32 bytes", "restore it from a backup")
        return public

    def forget_recovery(self) -> None:
        """Keep the public half of the recovery key only."""
        public = self.recovery().node
        self._write(self.recovery_public_file, public)
        with os_errors(self.recovery_file, "cannot be removed", "remove it yourself"):
            # Overwritten first: on disks that write in place nothing of it stays.
            write_synced(os.open(self.recovery_file, os.O_WRONLY), bytes(32))
            self.recovery_file.unlink()
            sync_directory(self.path)

    def read_identity(self) -> Identity:
        """The node's existing key."""
        return self._read_key(self.key_file)

    def _read_key(self, path: Path) -> Identity:
        try:
            # Without O_NONBLOCK a FIFO of that name would hang the start.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise UserError(f"{path}: there is no key", "give the data directory of a node that was started") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{path}: the key is a symbolic link", "put the file itself there") from None
            raise UserError(
                f"{path}: the key cannot be read ({error.strerror})", f"run as its owner: chown {os.geteuid()} {path}"
            ) from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path}: the key is not a file", "put the 32-byte key file there")
            if status.st_mode & 0o077:
                raise UserError(
                    f"{path}: others can read the key (mode {stat.S_IMODE(status.st_mode):04o})", f"chmod 600 {path}"
                )
            seed = os.read(descriptor, 33)
        finally:
            os.close(descriptor)
        if len(seed) != 32:
            size = f"{status.st_size} bytes"
            raise UserError(f"{path}: the key has {size}, not 32", "restore it from a backup, or use a new folder")
        return Identity(seed)

    def require_no_node(self) -> None:
        """Raise ``UserError`` where a node lives or lived here."""
        for path in (self.key_file, self.recovery_file, self.recovery_public_file):
            if os.path.lexists(path):
                raise UserError(f"{path}: there is a key already, and it is never overwritten", "use a new folder")
        if self.log_database.exists():
            raise UserError(f"{self.path}: another node's log lies there", "use a new folder")

    def import_keys(self, identity: bytes, recovery: bytes | None, boot: int) -> None:
        """Give a directory without a node the keys of one that lived elsewhere (32-byte seeds).

        ``boot`` must be at least as many starts as that node ever had: others take no presence for newer otherwise.
        """
        self.require_no_node()
        self._write(self.boot_file, f"{boot}\n".encode())
        # The identity last: with it the directory counts as a node's.
        if recovery is not None:
            self._make_key(self.recovery_file, recovery)
        self._make_key(self.key_file, identity)

    def _make_key(self, path: Path, seed: bytes | None = None) -> None:
        # Linked into place only once its bytes are durable: a crash leaves no key or a whole one, and an
        # existing key is never replaced (link fails as O_EXCL does).
        temporary = self.path / f".identity.{secrets.token_hex(8)}"
        with os_errors(path, "cannot be made", "choose a folder you own"), suppress(FileExistsError):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                write_synced(descriptor, secrets.token_bytes(32) if seed is None else seed)
                os.link(temporary, path)
            finally:
                temporary.unlink()
            sync_directory(self.path)

    # The lock

    @contextmanager
    def open_locked(self) -> Iterator[None]:
        """Hold the directory for this process; refuses, naming the pid, while another daemon holds it.

        The lock is the kernel's (flock), so a killed daemon leaves none behind. Inside, the directory exists.
        """
        self.create()
        with os_errors(self.lock_file, "cannot be opened", "run as the owner of the folder"):
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
                raise self._busy(holder) from None
            with os_errors(self.lock_file, "cannot be written", "check the rights and the room"):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def require_usable(self) -> None:
        """Raise ``UserError`` where a daemon runs on the directory, or this user could not make or write it."""
        if (holder := self.holder()) is not None:
            raise self._busy(str(holder or "unknown"))
        place = self.path
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            raise UserError(f"{place}: a file stands where a folder belongs", "choose another folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise UserError(f"{place}: this user cannot write there", "choose a folder you own")

    def _busy(self, holder: str) -> UserError:
        return UserError(
            f"{self.path}: another daemon runs on this data directory (pid {holder})",
            "stop it or choose another folder",
        )

    def holder(self) -> int | None:
        """The pid of the daemon that runs on this directory, 0 where it is not known, None without one."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            # Let go at once: a daemon that starts in this very moment would be refused.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            text = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            return int(text) if text.isdigit() else 0
        finally:
            os.close(descriptor)

    # Small durable state

    def next_boot(self) -> int:
        """Count this start, durably, and return its number (1 at the first): it orders a node's presences."""
        try:
            text = self.boot_file.read_text(encoding="ascii")
            previous = int(text)
            if not 0 <= previous < MAX_BOOT:
                raise ValueError
        except FileNotFoundError:
            previous = 0
        except (ValueError, OSError):
            raise UserError(
                f"{self.boot_file}: not a number", "write a number above every earlier one, such as 1000000"
            ) from None
        self._write(self.boot_file, f"{previous + 1}\n".encode())
        return previous + 1

    def known_peers(self) -> dict[str, tuple[str, ...]]:
        """Addresses (with ``/p2p/…``) by base58 peer id. It is a cache: a damaged file counts as empty."""
        try:
            with self.peers_file.open("rb") as file:
                value = json.loads(file.read(1 << 20))
            peers: dict[str, tuple[str, ...]] = {}
            for peer, addresses in list(value.items())[:MAX_KNOWN_PEERS]:
                good = [item for item in addresses if address_problem(item, peer=True) is None]
                node_id(peer)
                if good:
                    peers[peer] = tuple(good[:MAX_ADDRESSES])
            return peers
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError, PeerError) as error:
            logger.warning("%s: ignored (%s)", self.peers_file, error)
            return {}

    def save_peers(self, peers: Mapping[str, Sequence[str]]) -> None:
        """Remember ``peers``: addresses by base58 peer id. Raises ``OSError`` (a disk may fill while a node runs)."""
        kept = {peer: list(addresses) for peer, addresses in list(peers.items())[:MAX_KNOWN_PEERS]}
        write_atomic(self.peers_file, json.dumps(kept, indent=1, sort_keys=True).encode() + b"\n")

    def invitation(self) -> bytes | None:
        """The seed of the invitation that this node came by, if it did."""
        try:
            seed = bytes.fromhex(self.invitation_file.read_text(encoding="ascii").strip())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            seed = b""
        if len(seed) != 32:
            raise UserError(f"{self.invitation_file}: not an invitation", "join with the address again")
        return seed

    def save_invitation(self, seed: bytes) -> None:
        """Keep the seed of an invitation."""
        self._write(self.invitation_file, seed.hex().encode() + b"\n")

    def genesis(self) -> bytes | None:
        """The signed genesis as it was saved; the caller parses and thereby verifies it."""
        try:
            with self.genesis_file.open("rb") as file:
                return file.read(MAX_GENESIS_BYTES + 1)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise UserError(f"{self.path}: this is a file", "name a node's folder") from None
        except OSError as error:
            raise UserError(f"{self.genesis_file}: {error.strerror}", "make it readable for this user") from None

    def save_genesis(self, data: bytes) -> None:
        """Bind the directory to one domain for good."""
        present = self.genesis()
        if present is None:
            self._write(self.genesis_file, data)
        elif present != data:
            raise UserError(f"{self.path}: this data directory belongs to another domain", "use a new folder")

    def _write(self, path: Path, data: bytes) -> None:
        with os_errors(path, "cannot be written", "check the rights and the room"):
            write_atomic(path, data)

    # Room and sockets

    def free_bytes(self) -> int:
        """Bytes that this user may still write on the directory's file system."""
        return shutil.disk_usage(self.path).free

    def require_room(self, needed: int) -> None:
        """Raise ``UserError`` unless ``needed`` bytes are free."""
        free = self.free_bytes()
        if free < needed:
            raise UserError(
                f"{self.path}: the disk has {free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB are needed",
                "free some room or choose a folder on another disk",
            )

    def clean_work(self) -> None:
        """Empty ``work/``: what a crashed run left there is of no use."""
        if self.work.is_symlink():
            # Whatever else lies where it leads would go with it.
            raise UserError(
                f"{self.work}: a symbolic link, and this folder is emptied at each start",
                "make it a folder (a bind mount puts it on another disk)",
            )
        try:
            for item in self.work.iterdir():
                if item.is_dir() and not item.is_symlink():
                    shutil.rmtree(item)
                else:
                    item.unlink()
        except OSError as error:
            raise UserError(
                f"{error.filename or self.work}: cannot be emptied ({error.strerror})",
                f"check the rights in {self.work}",
            ) from None

    @contextmanager
    def socket_address(self) -> Iterator[str]:
        """A path for binding or connecting to ``control.sock``, however long the directory's own path is.

        The kernel takes at most 107 bytes (``sun_path``); a longer path goes through the directory's descriptor in
        ``/proc``. Valid inside the ``with`` block only.
        """
        plain = os.fspath(self.control_socket)
        if len(os.fsencode(plain)) <= 107:
            yield plain
            return
        descriptor = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{descriptor}/{self.control_socket.name}"
        finally:
            os.close(descriptor)
