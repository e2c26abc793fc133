"""The file that a key is exported into: what opens it, what does not, and who may read it."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl.pwhash import argon2id

from node.errors import UserError
from node.keys import key_file
from node.keys.key_file import Keys
from node.store.durable_files import write_new
from protocol.identity import Identity

OPS, MEMORY = int(argon2id.OPSLIMIT_MIN), int(argon2id.MEMLIMIT_MIN)
KEYS = Keys(bytes(range(32)), bytes(range(32, 64)))
SEALED = key_file.seal(KEYS, "correct horse", ops=OPS, memory=MEMORY)


@settings(max_examples=20)
@given(
    identity=st.binary(min_size=32, max_size=32),
    recovery=st.none() | st.binary(min_size=32, max_size=32),
    passphrase=st.text(st.characters(codec="utf-8"), max_size=40),
)
def test_what_is_sealed_opens_with_the_same_passphrase_only(
    identity: bytes, recovery: bytes | None, passphrase: str
) -> None:
    keys = Keys(identity, recovery)
    text = key_file.seal(keys, passphrase, ops=OPS, memory=MEMORY)
    assert key_file.unseal(text, passphrase, "f") == keys
    assert key_file.node_of(text, "f") == Identity(identity).node
    with pytest.raises(UserError, match="f: the passphrase is wrong"):
        key_file.unseal(text, passphrase + "x", "f")


def test_two_files_of_one_key_have_nothing_secret_in_common() -> None:
    first, second = json.loads(SEALED), json.loads(key_file.seal(KEYS, "correct horse", ops=OPS, memory=MEMORY))
    assert first["salt"] != second["salt"]
    assert first["box"][:48] != second["box"][:48]
    assert KEYS.identity.hex() not in SEALED


def test_by_default_guessing_costs_a_quarter_of_a_gibibyte() -> None:
    assert (key_file.OPS, key_file.MEMORY) == (3, 256 << 20)


@pytest.mark.parametrize("position", range(0, 208, 13))
def test_every_altered_byte_of_the_box_is_noticed(position: int) -> None:
    fields = json.loads(SEALED)
    box = bytearray.fromhex(fields["box"])
    box[position % len(box)] ^= 1
    with pytest.raises(UserError, match="damaged"):
        key_file.unseal(json.dumps({**fields, "box": box.hex()}), "correct horse", "f")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "farflung-key/2"}, "no key file"),
        ({"kdf": "scrypt"}, "no key file"),
        ({"salt": "00"}, "no key file"),
        ({"salt": 3}, "no key file"),
        ({"box": "zz"}, "no key file"),
        ({"box": "00"}, "no key file"),
        ({"more": 1}, "no key file"),
        ({"ops": 1 << 40}, "ops is not"),
        ({"ops": True}, "no key file"),
        ({"memory": 1 << 40}, "memory is not"),
        ({"node": "00" * 32}, "another node"),
    ],
)
def test_a_hostile_file_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        key_file.unseal(json.dumps({**json.loads(SEALED), **change}), "correct horse", "the file")
    assert str(caught.value).startswith("the file: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 3000, '"x"', "{}"])
def test_rubbish_is_no_key_file(text: str) -> None:
    with pytest.raises(UserError, match="no key file"):
        key_file.unseal(text, "x", "f")


def test_the_file_is_its_owners_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    write_new(path, SEALED.encode())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UserError, match="not overwritten"):
        write_new(path, b"other")
    assert key_file.read(path) == SEALED
    with pytest.raises(UserError, match="cannot be made"):
        write_new(tmp_path / "nowhere" / "key.json", SEALED.encode())


def test_a_file_that_cannot_be_one_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        key_file.read(tmp_path)
    (tmp_path / "large").write_bytes(bytes(5000))
    with pytest.raises(UserError, match="no key file"):
        key_file.read(tmp_path / "large")
