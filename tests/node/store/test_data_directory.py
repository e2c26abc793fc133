"""The data directory: key, lock, counters, peers, room, long socket paths."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from node.errors import UserError
from node.store.data_directory import DataDirectory
from protocol.identity import Identity, peer_id

PEER = peer_id(Identity(bytes(32)).node)


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    made = DataDirectory(tmp_path / "node")
    made.create()
    return made


def test_create_makes_private_folders(directory: DataDirectory) -> None:
    directory.create()
    for folder in (directory.path, directory.log, directory.blobs, directory.versions, directory.work):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("file", "folder"), [("node", "node"), ("node", "node/below"), ("node/blobs", "node")])
def test_create_over_a_file_names_it(file: str, folder: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    with pytest.raises(UserError, match=f"{tmp_path / file}.*: a file stands where a folder belongs"):
        DataDirectory(tmp_path / folder).create()


def test_the_key_is_made_once(directory: DataDirectory) -> None:
    assert not directory.exists()
    with pytest.raises(UserError, match="there is no key"):
        directory.read_identity()
    first = directory.identity()
    assert directory.exists()
    assert directory.key_file.stat().st_mode & 0o777 == 0o600
    assert directory.key_file.read_bytes() == first.seed
    assert directory.identity().node == first.node
    assert not [item for item in directory.path.iterdir() if item.name.startswith(".identity")]


def test_the_recovery_key_is_another_key(directory: DataDirectory) -> None:
    with pytest.raises(UserError, match="there is no key"):
        directory.recovery()
    assert directory.make_recovery()
    assert not directory.make_recovery()
    recovery = directory.recovery()
    assert directory.recovery().node == recovery.node != directory.identity().node
    assert directory.recovery_public() == recovery.node
    assert directory.recovery_file.stat().st_mode & 0o777 == 0o600
    assert not directory.recovery_forgotten


def test_a_forgotten_recovery_key_is_not_made_anew(directory: DataDirectory) -> None:
    public = directory.recovery_public()
    seed = directory.recovery().seed
    directory.forget_recovery()
    assert directory.recovery_forgotten
    assert not directory.recovery_file.exists()
    assert not any(seed in item.read_bytes() for item in directory.path.iterdir() if item.is_file())
    assert not directory.make_recovery()
    assert directory.recovery_public() == public
    with pytest.raises(UserError, match="was forgotten here"):
        directory.recovery()
    with pytest.raises(UserError, match="never overwritten"):
        directory.require_no_node()
    directory.recovery_public_file.write_bytes(b"short")
    with pytest.raises(UserError, match="32 bytes"):
        directory.recovery_public()


def test_a_crash_while_the_key_is_made_leaves_none(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UserError, match="No space left"):
            directory.identity()
    assert not directory.exists()
    assert len(directory.identity().node) == 32


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_key_of_the_wrong_size(directory: DataDirectory, size: int) -> None:
    directory.key_file.touch(0o600)
    directory.key_file.write_bytes(bytes(size))
    with pytest.raises(UserError, match=f"the key has {size} bytes, not 32"):
        directory.identity()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_can_read(directory: DataDirectory, mode: int) -> None:
    directory.identity()
    directory.key_file.chmod(mode)
    with pytest.raises(UserError, match=f"mode {mode:04o}.*chmod 600"):
        directory.identity()


def test_a_key_that_is_no_file(directory: DataDirectory) -> None:
    directory.key_file.mkdir()
    with pytest.raises(UserError, match="not a file"):
        directory.identity()
    directory.key_file.rmdir()
    os.mkfifo(directory.key_file)
    with pytest.raises(UserError, match="not a file"):
        directory.identity()
    directory.key_file.unlink()
    directory.key_file.symlink_to("elsewhere")
    with pytest.raises(UserError, match="symbolic link"):
        directory.identity()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_key_that_cannot_be_read(directory: DataDirectory) -> None:
    directory.identity()
    directory.key_file.chmod(0)
    with pytest.raises(UserError, match="cannot be read"):
        directory.identity()


def test_a_second_daemon_is_refused_by_pid(directory: DataDirectory) -> None:
    with (
        directory.open_locked(),
        pytest.raises(UserError, match=rf"pid {os.getpid()}\)"),
        DataDirectory(directory.path).open_locked(),
    ):
        pass
    with directory.open_locked():
        pass


def test_the_lock_of_a_killed_daemon_is_gone(directory: DataDirectory) -> None:
    script = (
        "import sys, time; from node.store.data_directory import DataDirectory\n"
        "with DataDirectory(sys.argv[1]).open_locked():\n    print('held', flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", script, str(directory.path)], stdout=subprocess.PIPE, cwd=root
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=rf"pid {process.pid}\)"), directory.open_locked():
            pass
        process.kill()
        process.wait()
    with directory.open_locked():
        pass


def test_a_lock_that_cannot_be_written(directory: DataDirectory) -> None:
    directory.lock_file.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"lock: cannot be written"), directory.open_locked():
        pass


@pytest.mark.parametrize("text", ["four", "-5", str(2**63 - 1), "9" * 30, ""])
def test_a_damaged_count_of_boots(text: str, directory: DataDirectory) -> None:
    directory.boot_file.write_text(text)
    with pytest.raises(UserError, match="not a number"):
        directory.next_boot()


def test_boots_are_counted(directory: DataDirectory) -> None:
    assert [directory.next_boot() for _ in range(3)] == [1, 2, 3]
    assert DataDirectory(directory.path).next_boot() == 4


def test_peers(directory: DataDirectory) -> None:
    assert directory.known_peers() == {}
    address = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
    directory.save_peers({PEER: [address]})
    assert directory.known_peers() == {PEER: (address,)}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": ["b"]}', b"\xff", b"[" * 100_000])
def test_damaged_peers_count_as_none(directory: DataDirectory, damage: bytes) -> None:
    directory.peers_file.write_bytes(damage)
    assert directory.known_peers() == {}


def test_the_genesis_is_for_good(directory: DataDirectory) -> None:
    assert directory.genesis() is None
    directory.save_genesis(b"one")
    directory.save_genesis(b"one")
    with pytest.raises(UserError, match="belongs to another domain"):
        directory.save_genesis(b"two")
    assert directory.genesis() == b"one"


def test_the_genesis_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "log.db").touch()
    with pytest.raises(UserError, match="this is a file; name a node's folder"):
        DataDirectory(tmp_path / "log.db").genesis()


def test_room(directory: DataDirectory) -> None:
    directory.require_room(1)
    with pytest.raises(UserError, match="the disk has"):
        directory.require_room(10**18)


def test_clean_work(directory: DataDirectory) -> None:
    (directory.work / "folder").mkdir()
    (directory.work / "folder" / "file").touch()
    (directory.work / "link").symlink_to(directory.path)
    directory.clean_work()
    assert list(directory.work.iterdir()) == []
    assert directory.path.is_dir()


def test_work_that_leads_elsewhere_is_not_emptied(directory: DataDirectory, tmp_path: Path) -> None:
    (tmp_path / "thesis").touch()
    directory.work.rmdir()
    directory.work.symlink_to(tmp_path)
    with pytest.raises(UserError, match="a symbolic link"):
        directory.clean_work()
    assert (tmp_path / "thesis").exists()


def test_work_that_cannot_be_emptied(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (directory.work / "folder").mkdir()
    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(UserError, match=r"folder: cannot be emptied \(Permission denied\)"):
        directory.clean_work()


@pytest.mark.parametrize("length", [1, 200])
def test_sockets_in_long_paths(tmp_path: Path, length: int) -> None:
    directory = DataDirectory(tmp_path / ("x" * length))
    directory.create()
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with directory.socket_address() as address:
            server.bind(address)
        server.listen()
        assert directory.control_socket.is_socket()
        with directory.socket_address() as address:
            client.connect(address)
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(b"hello")
        assert client.recv(5) == b"hello"


def test_user_errors_are_one_line() -> None:
    error = UserError("a\nb", "c\n d")
    assert str(error) == "a b; c d"
