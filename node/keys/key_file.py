"""A node's keys in one file under a passphrase, to be kept away from the machine or moved to another one.

The file is JSON text (printable, so that it survives being mailed or printed)::

    {"format": "farflung-key/1",
     "node": "<64 hex>",            node id, so that the file can be told from others without the passphrase
     "kdf": "argon2id13",           RFC 9106, version 0x13, through libsodium's crypto_pwhash
     "ops": 3, "memory": 268435456, passes and bytes (libsodium's "moderate")
     "salt": "<32 hex>",            16 random bytes
     "box": "<hex>"}                24 random bytes of nonce, then XSalsa20-Poly1305 (crypto_secretbox) of the secret

1. The secret is 32 bytes of identity seed, followed by 32 bytes of recovery seed where the node has one.
2. The secret itself proves ``node``: a file whose decrypted key has another node id is refused.
3. ``ops`` and ``memory`` are bounded before they are used: a hostile file must not exhaust the machine.
4. A wrong passphrase and an altered file cannot be told apart, and the message says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from nacl.exceptions import CryptoError
from nacl.pwhash import argon2id
from nacl.secret import SecretBox
from nacl.utils import random as random_bytes

from node.errors import UserError
from node.store.durable_files import read_named
from protocol.identity import Identity

FORMAT: Final = "farflung-key/1"
KDF: Final = "argon2id13"
OPS: Final = int(argon2id.OPSLIMIT_MODERATE)
MEMORY: Final = int(argon2id.MEMLIMIT_MODERATE)
MAX_OPS: Final = 64
MAX_MEMORY: Final = 2 << 30
MAX_FILE_BYTES: Final = 4096
MIN_PASSPHRASE: Final = 8
"""Characters; argon2id makes guessing dear, not a short passphrase long."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a key file holds: 32-byte seeds. ``recovery`` is None for a node that never opened its feed."""

    identity: bytes
    recovery: bytes | None

    @property
    def node(self) -> bytes:
        """The node id that the identity stands for."""
        return Identity(self.identity).node


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal["farflung-key/1"]
    node: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    kdf: Literal["argon2id13"]
    ops: int
    memory: int
    salt: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    box: Annotated[str, Meta(pattern="^([0-9a-f]{2}){24,}$")]


def seal(keys: Keys, passphrase: str, *, ops: int = OPS, memory: int = MEMORY) -> str:
    """The text of the file that ``unseal`` opens with the same passphrase. Fills ``memory`` bytes for a moment."""
    salt = random_bytes(int(argon2id.SALTBYTES))
    box = SecretBox(_key(passphrase, salt, ops, memory))
    sealed = bytes(box.encrypt(keys.identity + (keys.recovery or b"")))
    fields = _Fields(FORMAT, keys.node.hex(), KDF, ops, memory, salt.hex(), sealed.hex())
    return json.dumps(msgspec.to_builtins(fields), indent=1) + "\n"


def unseal(text: str, passphrase: str, where: str) -> Keys:
    """The keys in a file's ``text``; ``where`` names the file in a ``UserError``."""
    fields = _fields(text, where)
    key = _key(passphrase, bytes.fromhex(fields.salt), fields.ops, fields.memory)
    try:
        secret = SecretBox(key).decrypt(bytes.fromhex(fields.box))
    except CryptoError:
        raise UserError(
            f"{where}: the passphrase is wrong, or the file is damaged", "try again, or use another copy of the file"
        ) from None
    if len(secret) not in (32, 64):
        raise UserError(f"{where}: it holds no key of a known length", "use another copy of the file")
    keys = Keys(secret[:32], secret[32:] or None)
    if keys.node.hex() != fields.node:
        raise UserError(f"{where}: it holds the key of another node than it says", "use another copy of the file")
    return keys


def node_of(text: str, where: str) -> bytes:
    """The node id that a file claims to hold the key of. Raises ``UserError`` for what is no key file."""
    return bytes.fromhex(_fields(text, where).node)


def read(path: Path) -> str:
    """The text of a key file. Raises ``UserError``."""
    data = read_named(path, MAX_FILE_BYTES, "name a file made by identity export")
    if len(data) > MAX_FILE_BYTES:
        raise _unknown(str(path))
    return data.decode("ascii", "replace")


def _key(passphrase: str, salt: bytes, ops: int, memory: int) -> bytes:
    try:
        return bytes(argon2id.kdf(int(SecretBox.KEY_SIZE), passphrase.encode(), salt, opslimit=ops, memlimit=memory))
    except (CryptoError, MemoryError):
        raise UserError(f"the passphrase cannot be worked on: {memory >> 20} MB of free memory are needed") from None


def _fields(text: str, where: str) -> _Fields:
    try:
        fields = msgspec.json.decode(text, type=_Fields)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise _unknown(where) from None
    limits = (("ops", int(argon2id.OPSLIMIT_MIN), MAX_OPS), ("memory", int(argon2id.MEMLIMIT_MIN), MAX_MEMORY))
    for name, low, high in limits:
        if not low <= getattr(fields, name) <= high:
            raise UserError(f"{where}: {name} is not an integer from {low} to {high}", "use another copy of the file")
    return fields


def _unknown(where: str) -> UserError:
    return UserError(f"{where}: this is no key file of a known form", "name a file made by farflung identity export")
