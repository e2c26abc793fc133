"""farflung.toml: what is accepted, what is refused and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node import config
from node.config import Config, DevnetConfig
from node.errors import UserError
from protocol.identity import Identity, peer_id

PEER = peer_id(Identity(bytes(32)).node)
PATH = Path("farflung.toml")


def test_a_missing_file_is_the_default(tmp_path: Path) -> None:
    assert config.load(tmp_path / "farflung.toml") == Config()


def test_write_and_load(tmp_path: Path) -> None:
    path = tmp_path / "farflung.toml"
    value = Config(
        name='a "quoted" \\ name',
        listen=("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/4001"),
        bootstrap=(f"/dns4/example.org/tcp/4001/p2p/{PEER}",),
        willing=("inference",),
        log_level="debug",
        threads=3,
        devnet=DevnetConfig(cheat="forged-reward", pause_at_step=7),
    )
    config.write(value, path)
    assert config.load(path) == value
    config.write(Config(), path)
    assert config.load(path) == Config()
    assert [item.name for item in tmp_path.iterdir()] == ["farflung.toml"]


@given(name=st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=32))
def test_every_name_survives(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "names.toml"
    config.write(Config(name=name), path)
    assert config.load(path).name == name


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("colour = 1", "'colour'"),
        ("[devnet]\ncheats = 1", "'devnet.cheats'"),
        ("devnet = 1", "devnet"),
        ("name = 1", "name"),
        ('name = ""', "name"),
        (f'name = "{"x" * 33}"', "name"),
        ('name = "\\n"', "name"),
        ("listen = []", "listen"),
        ('listen = "/ip4/127.0.0.1/tcp/1"', "listen"),
        ('listen = ["/ip4/127.0.0.1/udp/1"]', "listen"),
        ('listen = ["/ip4/127.0.0.300/tcp/1"]', "listen"),
        ('listen = ["/ip6/127.0.0.1/tcp/1"]', "listen"),
        ('listen = ["/ip4/127.0.0.1/tcp/70000"]', "listen"),
        (f'listen = ["/ip4/127.0.0.1/tcp/1/p2p/{PEER}"]', "listen"),
        ("listen = [1]", "listen"),
        ('bootstrap = ["/ip4/127.0.0.1/tcp/1"]', "bootstrap"),
        ('bootstrap = ["/ip4/127.0.0.1/tcp/1/p2p/12D3KooW"]', "bootstrap"),
        (f'bootstrap = ["/ip4/127.0.0.1/tcp/0/p2p/{PEER}"]', "bootstrap"),
        ('willing = ["none"]', "willing"),
        ('willing = ["relay", "relay"]', "willing"),
        ("willing = [[]]", "willing"),
        ('log_level = "loud"', "log_level"),
        ("log_level = []", "log_level"),
        ("threads = 0", "threads"),
        ("threads = true", "threads"),
        ("threads = 1.5", "threads"),
        ('[devnet]\ncheat = "steal"', "devnet.cheat"),
        ("[devnet]\npause_at_step = -1", "devnet.pause_at_step"),
    ],
)
def test_a_mistake_names_file_and_key(text: str, key: str) -> None:
    with pytest.raises(UserError) as caught:
        config.parse(text, PATH)
    message = str(caught.value)
    assert message.startswith("farflung.toml: ")
    assert key in message
    assert "\n" not in message


def test_broken_toml_names_the_line() -> None:
    with pytest.raises(UserError, match="line 2"):
        config.parse('name = "a"\nlisten = oops', PATH)


def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "farflung.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(UserError, match="UTF-8"):
        config.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        config.load(tmp_path)


def test_a_bad_configuration_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="threads"):
        config.write(Config(threads=0), tmp_path / "farflung.toml")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot be written"):
        config.write(Config(), tmp_path / "missing" / "farflung.toml")
