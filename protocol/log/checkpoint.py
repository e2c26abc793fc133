"""Cuts as a transparency log: C2SP checkpoints with the electors' cosignatures, for anybody's tools to check.

1. The checkpoint log is the RFC 9162 tree whose leaf h − 1 holds the body of the cut of height h. Cuts are a chain, so
   the tree only grows; consistency proofs between two checkpoints show it to who holds no cut at all.
2. A checkpoint's text has three lines (https://c2sp.org/tlog-checkpoint@v1.0.0): the origin ``farflung/<domain id in
   hex>``, the tree's size (the newest cut's height, in decimal), its root in base64. No extension lines.
3. An elector's cosignature is ``cosignature/v1`` (https://c2sp.org/tlog-cosignature): 8 bytes of POSIX time and the
   Ed25519 signature over ``cosignature/v1``, ``time <seconds>`` and the checkpoint's text. It is made with the
   elector's node key under the one name ``farflung/node/<node id in hex>``: version 1 does not sign the name, so a key
   must not have two. The time informs people and decides nothing.
4. A checkpoint holds where a quorum of the electors in force for the cut of its height cosigned it. There is no other
   signature: nobody operates the log.
5. An elector cosigns a checkpoint only from its own cuts, once it has stored the last of them: so it never signs two
   that are inconsistent.

Parsers raise ``PeerError`` and nothing else.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from protocol import identity
from protocol.errors import LocalError, PeerError
from protocol.identity import Identity
from protocol.log import signed_note
from protocol.log.quorum import quorum
from protocol.log.signed_note import COSIGNATURE, Note, Signature, VerifierKey

MAX_CHECKPOINT_BYTES: Final = 64 << 10
"""Largest encoded checkpoint: some 250 bytes a cosignature, of 64 electors at most, and room for others' lines."""

MAX_SIZE: Final = 2**62
MAX_TIME: Final = 2**63 - 1

# Our own contexts all begin with "farflung/", libp2p signs "noise-libp2p-static-key:…" and "libp2p-…" with the same
# key. This one differs from all of them in its first byte, so no signature of one kind passes for another.
HEADER: Final = b"cosignature/v1\n"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The head of a domain's checkpoint log: ``size`` cuts (at least one) under the 32-byte ``root``."""

    domain: bytes
    size: int
    root: bytes

    @property
    def text(self) -> str:
        """The note's text."""
        return f"{origin(self.domain)}\n{self.size}\n{b64encode(self.root).decode()}\n"

    @classmethod
    def parse(cls, text: str, domain: bytes) -> Checkpoint:
        """The checkpoint of ``domain`` that a note's ``text`` is; raises ``PeerError``."""
        lines = text.split("\n")
        if len(lines) != 4 or lines[3]:
            raise PeerError("checkpoint: its text has three lines")
        if lines[0] != origin(domain):
            raise PeerError("checkpoint: it is of another log")
        if not (lines[1].isascii() and lines[1].isdigit()) or len(lines[1]) > 19 or lines[1].startswith("0"):
            raise PeerError("checkpoint: the size is not a positive decimal number")
        size = int(lines[1])
        if size > MAX_SIZE:
            raise PeerError("checkpoint: the size is out of range")
        root = signed_note.unbase64(lines[2], "checkpoint")
        if len(root) != 32:
            raise PeerError("checkpoint: a root has 32 bytes")
        return cls(domain, size, root)


@dataclass(frozen=True, slots=True)
class CosignedCheckpoint:
    """A checkpoint and cosignatures of electors (elector → time, signature): all verified, ascending by elector."""

    checkpoint: Checkpoint
    cosignatures: tuple[tuple[bytes, int, bytes], ...]

    def encode(self) -> bytes:
        """The signed note."""
        return Note(
            self.checkpoint.text,
            tuple(
                Signature(name(elector), verifier_key(elector).id, time.to_bytes(8, "big") + signature)
                for elector, time, signature in self.cosignatures
            ),
        ).encode()

    @classmethod
    def parse(cls, data: bytes, domain: bytes, electors: Sequence[bytes] | None = None) -> CosignedCheckpoint:
        """The checkpoint in a note that some of ``electors`` cosigned (None: whoever cosigned it as a node); their
        quorum is checked by ``require_quorum``.

        Lines by other keys are ignored, as the specification demands; a wrong one by an elector is a ``PeerError``, and
        so is a second one, or a note without any.
        """
        parsed = Note.parse(data, max_bytes=MAX_CHECKPOINT_BYTES)
        checkpoint = Checkpoint.parse(parsed.text, domain)
        if electors is None:
            electors = [key for key in map(_node_of, parsed.signatures) if key is not None]
        found = []
        for elector in sorted(set(electors)):
            signatures = parsed.of(verifier_key(elector))
            if len(signatures) > 1:
                raise PeerError("checkpoint: an elector cosigned it twice")
            for signature in signatures:
                found.append((elector, *verify_cosignature(checkpoint, elector, signature)))
        if not found:
            raise PeerError("checkpoint: no elector cosigned it")
        return cls(checkpoint, tuple(found))

    def require_quorum(self, electors: Sequence[bytes]) -> None:
        """Raise ``PeerError`` unless a quorum of ``electors`` cosigned."""
        signers = {elector for elector, _, _ in self.cosignatures} & set(electors)
        if len(signers) < quorum(len(electors)):
            raise PeerError(f"checkpoint: {len(signers)} cosignatures are no quorum of {len(electors)} electors")

    @property
    def time(self) -> int:
        """The median of the times at which electors cosigned, in POSIX seconds: no minority of them can move it far."""
        return sorted(time for _, time, _ in self.cosignatures)[len(self.cosignatures) // 2]


def origin(domain: bytes) -> str:
    """The origin line of a domain's checkpoints."""
    return f"farflung/{domain.hex()}"


def name(elector: bytes) -> str:
    """The one name under which a node key cosigns."""
    return f"farflung/node/{elector.hex()}"


def _node_of(line: Signature) -> bytes | None:
    """The node whose cosignature a line is, by name and key id."""
    try:
        node = bytes.fromhex(line.name.removeprefix(name(b"")))
    except ValueError:
        return None
    return node if len(node) == 32 and (line.name, line.key_id) == (name(node), verifier_key(node).id) else None


def verifier_key(elector: bytes) -> VerifierKey:
    """What others' tools need to know of an elector."""
    return VerifierKey(name(elector), COSIGNATURE, elector)


def cosigned_message(text: str, time: int) -> bytes:
    """What a cosignature of the checkpoint with this ``text`` covers."""
    return HEADER + f"time {time}\n".encode() + text.encode()


def cosign(elector: Identity, checkpoint: Checkpoint, time: int) -> bytes:
    """The 72 bytes of a cosignature, made at ``time`` (POSIX seconds)."""
    if not 0 <= time <= MAX_TIME:
        raise LocalError(f"{time} is no time of a cosignature")
    return time.to_bytes(8, "big") + elector.sign(b"", cosigned_message(checkpoint.text, time))


def verify_cosignature(checkpoint: Checkpoint, elector: bytes, signature: bytes) -> tuple[int, bytes]:
    """(time, 64-byte signature) of a cosignature of 72 bytes; ``PeerError`` where it does not hold."""
    if len(signature) != 72:
        raise PeerError("cosignature: it has 8 bytes of time and 64 of signature")
    time = int.from_bytes(signature[:8], "big")
    if time > MAX_TIME:
        raise PeerError("cosignature: its time is out of range")
    identity.verify(elector, b"", cosigned_message(checkpoint.text, time), signature[8:], "cosignature")
    return time, signature[8:]


def size(data: bytes, domain: bytes) -> int:
    """How many cuts a note says it covers, with nothing of it verified; ``PeerError`` where it is no checkpoint."""
    return Checkpoint.parse(Note.parse(data, max_bytes=MAX_CHECKPOINT_BYTES).text, domain).size


def read(data: bytes, domain: bytes, electors_at: Callable[[int], Sequence[bytes]]) -> CosignedCheckpoint:
    """A checkpoint that a quorum cosigned of the electors in force for the cut of its height, which ``electors_at``
    gives; ``PeerError`` for anything else."""
    electors = electors_at(size(data, domain))
    found = CosignedCheckpoint.parse(data, domain, electors)
    found.require_quorum(electors)
    return found


def assemble(
    checkpoint: Checkpoint, cosignatures: Mapping[bytes, bytes], electors: Sequence[bytes]
) -> CosignedCheckpoint:
    """The checkpoint with the cosignatures (elector → 72 bytes) of those ``electors`` whose holds.

    Raises ``PeerError`` where those are no quorum: what somebody answered is that elector's mistake alone.
    """
    good = []
    for elector in sorted(set(electors) & cosignatures.keys()):
        try:
            good.append((elector, *verify_cosignature(checkpoint, elector, cosignatures[elector])))
        except PeerError:
            continue
    made = CosignedCheckpoint(checkpoint, tuple(good))
    made.require_quorum(electors)
    return made
