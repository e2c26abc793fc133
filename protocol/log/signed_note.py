"""Signed notes of C2SP: a text, and lines of signatures below it (https://c2sp.org/signed-note@v1.0.0).

1. A note is UTF-8 without control characters other than newline. Its text ends in a newline; a blank line, the last
   one of the note, parts it from the signature lines, of which there is at least one.
2. A signature line is ``— <name> <base64>``: an em dash, the key's name (not empty, without spaces and plus signs),
   and the base64 of 4 bytes of key id and the signature. base64 is the standard alphabet with padding, in its one
   canonical form.
3. A key id is the first 4 bytes of SHA-256(name ‖ newline ‖ type ‖ public key); a verifier key ("vkey") is
   ``<name>+<key id in hex>+<base64 of type ‖ public key>``.
4. Signatures by unknown keys are ignored; one by a known key that does not hold makes the note worthless, and a note
   without one by a known key is.

Parsers raise ``PeerError`` and nothing else.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from protocol.errors import LocalError, PeerError

COSIGNATURE: Final = 0x04
"""Signature type: timestamped Ed25519 cosignature of a checkpoint (see ``protocol.log.checkpoint``)."""

MAX_SIGNATURES: Final = 256
"""Signature lines of one note: a quorum of the largest set of electors, and others' beside it."""

_LINE: Final = re.compile(r"— ([^ ]+) ([A-Za-z0-9+/]+=*)")


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature line: the key's ``name``, its 4-byte ``key_id``, and the bytes behind that."""

    name: str
    key_id: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """A public key of 32 bytes under the name by which notes know it, for one signature type."""

    name: str
    type: int
    key: bytes

    @property
    def id(self) -> bytes:
        """The 4-byte key id."""
        return sha256(self.name.encode() + b"\n" + bytes([self.type]) + self.key).digest()[:4]

    def encode(self) -> str:
        """The text form."""
        return f"{self.name}+{self.id.hex()}+{b64encode(bytes([self.type]) + self.key).decode()}"


@dataclass(frozen=True, slots=True)
class Note:
    """A text that ends in a newline, and at least one signature. Nothing is verified by parsing it."""

    text: str
    signatures: tuple[Signature, ...]

    def encode(self) -> bytes:
        """The note's bytes; ``LocalError`` for one that others would refuse."""
        lines = [f"— {line.name} {b64encode(line.key_id + line.signature).decode()}\n" for line in self.signatures]
        data = (self.text + "\n" + "".join(lines)).encode()
        try:
            if Note.parse(data, max_bytes=len(data)) != self:
                raise LocalError("refusing to write a note that reads differently")
        except PeerError as error:
            raise LocalError(f"refusing to write a bad note: {error}") from None
        return data

    @classmethod
    def parse(cls, data: bytes, *, max_bytes: int) -> Note:
        """Strict parser; raises ``PeerError``."""
        if len(data) > max_bytes:
            raise PeerError(f"note: {len(data)} bytes, at most {max_bytes} are allowed")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise PeerError("note: not UTF-8") from None
        if any(character < " " and character != "\n" for character in text):
            raise PeerError("note: it holds a control character")
        body, blank, tail = text.rpartition("\n\n")
        if not blank or not tail.endswith("\n"):
            raise PeerError("note: no text with signature lines below a blank line")
        lines = tail[:-1].split("\n")
        if len(lines) > MAX_SIGNATURES:
            raise PeerError(f"note: {len(lines)} signatures, at most {MAX_SIGNATURES} are allowed")
        return cls(body + "\n", tuple(map(_signature, lines)))

    def of(self, key: VerifierKey) -> list[bytes]:
        """The signatures that name this key, not yet verified."""
        return [line.signature for line in self.signatures if (line.name, line.key_id) == (key.name, key.id)]


def good_name(name: str) -> bool:
    """Whether a key may have this name."""
    return bool(name) and not any(character.isspace() or character == "+" or character < " " for character in name)


def unbase64(text: str, what: str) -> bytes:
    """The bytes whose one canonical base64 form ``text`` is; raises ``PeerError``."""
    try:
        raw = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise PeerError(f"{what}: not base64") from None
    if b64encode(raw).decode() != text:
        raise PeerError(f"{what}: not the canonical base64")
    return raw


def _signature(line: str) -> Signature:
    found = _LINE.fullmatch(line)
    if found is None or not good_name(found[1]):
        raise PeerError("note: a signature line has another form")
    raw = unbase64(found[2], "note")
    if len(raw) < 5:
        raise PeerError("note: a signature is missing")
    return Signature(found[1], raw[:4], raw[4:])
