"""Checkpoints and cosignatures: the specification's example, quorums, and a tree that only grows."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import VerifyKey

from protocol import identity
from protocol.errors import LocalError, PeerError
from protocol.log import merkle
from protocol.log.checkpoint import (
    MAX_CHECKPOINT_BYTES,
    MAX_TIME,
    Checkpoint,
    CosignedCheckpoint,
    assemble,
    cosign,
    cosigned_message,
    origin,
    verifier_key,
    verify_cosignature,
)
from protocol.log.merkle import EMPTY_RANGE, inclusion_proof, leaf_hash, verify_inclusion
from protocol.log.signed_note import Note, Signature
from tests.protocol.builders import digest, key
from tests.protocol.reference_log import ReferenceLog, parse_verifier_key, verify_consistency
from tests.vectors import public

NAMES = ("a", "b", "c", "d")
ELECTORS = tuple(sorted(key(name).node for name in NAMES))
DOMAIN = digest("domain")
BODIES = [f"cut {number}".encode() for number in range(20)]
LOG = ReferenceLog(DOMAIN, BODIES)
CHECKPOINT = LOG.checkpoint()


def cosigned(*names: str, time: int = 1_700_000_000) -> CosignedCheckpoint:
    """The newest checkpoint with these electors' cosignatures; the times of several differ by a second each."""
    made = {key(name).node: cosign(key(name), CHECKPOINT, time + place) for place, name in enumerate(names)}
    found = [(elector, *verify_cosignature(CHECKPOINT, elector, made[elector])) for elector in sorted(made)]
    return CosignedCheckpoint(CHECKPOINT, tuple(found))


def read(data: bytes) -> CosignedCheckpoint:
    """Through the parser."""
    return CosignedCheckpoint.parse(data, DOMAIN, ELECTORS)


def test_the_specifications_example_has_our_form() -> None:
    example = json.loads(public("c2sp", "examples.json").read_bytes())["cosigned_checkpoint"]["note"]
    note = Note.parse(example.encode(), max_bytes=MAX_CHECKPOINT_BYTES)
    assert note.encode() == example.encode()
    assert [line.name for line in note.signatures] == ["example.com/behind-the-sofa", "witness.example.com/w1"]
    witness = note.signatures[1]
    assert witness.key_id.hex() == "8d66cf3f"
    assert len(witness.signature) == 72
    time = int.from_bytes(witness.signature[:8], "big")
    assert time == 1_679_315_147
    # The message as the specification prints it.
    assert cosigned_message(note.text, time).decode() == (
        "cosignature/v1\ntime 1679315147\nexample.com/behind-the-sofa\n20852163\n"
        "CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n"
    )
    # Its text is a checkpoint, though not one of ours: three lines, a size and a root.
    ours = note.text.replace("example.com/behind-the-sofa", origin(DOMAIN))
    parsed = Checkpoint.parse(ours, DOMAIN)
    assert (parsed.size, parsed.text) == (20_852_163, ours)
    with pytest.raises(PeerError, match="another log"):
        Checkpoint.parse(note.text, DOMAIN)


def test_our_checkpoints_are_what_the_specifications_say() -> None:
    """Taken apart word for word, and verified with nothing of ours."""
    text, _, tail = cosigned("a").encode().decode().partition("\n\n")
    assert text.split("\n") == [f"farflung/{DOMAIN.hex()}", "20", b64encode(merkle.root(BODIES)).decode()]
    dash, name, payload = tail.removesuffix("\n").split(" ")
    assert (dash, name) == ("—", f"farflung/node/{key('a').node.hex()}")
    raw = b64decode(payload)
    assert raw[:4] == sha256(name.encode() + b"\n\x04" + key("a").node).digest()[:4]
    assert int.from_bytes(raw[4:12], "big") == 1_700_000_000
    message = f"cosignature/v1\ntime 1700000000\n{text}\n".encode()
    VerifyKey(key("a").node).verify(message, raw[12:])
    vkey = verifier_key(key("a").node)
    assert parse_verifier_key(vkey.encode()) == vkey


def test_a_cosignature_is_none_of_our_own_signatures() -> None:
    message = cosigned_message(CHECKPOINT.text, 0)
    contexts = [value for name, value in vars(identity).items() if name.isupper() and isinstance(value, bytes)]
    assert len(contexts) > 6
    for context in (*contexts, b"noise-libp2p-static-key:", b"libp2p-pubsub:", b"libp2p-tls-handshake:"):
        if not context.startswith(b"\0"):  # the prefix of peer ids is no context
            assert message[:1] != context[:1]


def test_a_quorum_is_required_and_strangers_do_not_count() -> None:
    for names in (("a", "b", "c"), NAMES, (*NAMES[1:], "stranger")):
        data = cosigned(*names).encode()
        read(data).require_quorum(ELECTORS)
    two = read(cosigned("a", "b", "stranger").encode())
    assert len(two.cosignatures) == 2
    with pytest.raises(PeerError, match="no quorum"):
        two.require_quorum(ELECTORS)
    with pytest.raises(PeerError, match="no elector"):
        read(cosigned("stranger").encode())


def test_an_electors_wrong_or_second_line_is_refused() -> None:
    good = cosigned("a", "b", "c")
    note = Note.parse(good.encode(), max_bytes=MAX_CHECKPOINT_BYTES)
    first = note.signatures[0]
    twice = Note(note.text, (*note.signatures, first)).encode()
    with pytest.raises(PeerError, match="twice"):
        read(twice)
    for wrong in (bytes(72), first.signature[:-1], first.signature + b"\0", b"\xff" * 8 + first.signature[8:]):
        line = Signature(first.name, first.key_id, wrong)
        with pytest.raises(PeerError):
            read(Note(note.text, (line, *note.signatures[1:])).encode())
    with pytest.raises(PeerError):
        read(bytes(MAX_CHECKPOINT_BYTES + 1))


def test_every_flipped_byte_costs_at_least_the_quorum() -> None:
    data = cosigned("a", "b", "c").encode()
    for place in range(len(data)):
        flipped = data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :]
        with pytest.raises(PeerError):
            read(flipped).require_quorum(ELECTORS)


def test_what_electors_answered_is_assembled() -> None:
    answers = {key(name).node: cosign(key(name), CHECKPOINT, 7) for name in (*NAMES, "stranger")}
    made = assemble(CHECKPOINT, answers, ELECTORS)
    assert [elector for elector, _, _ in made.cosignatures] == list(ELECTORS)
    assert read(made.encode()) == made
    answers[ELECTORS[0]] = bytes(72)
    answers[ELECTORS[1]] = answers[ELECTORS[1]]
    assert [elector for elector, _, _ in assemble(CHECKPOINT, answers, ELECTORS).cosignatures] == list(ELECTORS[1:])
    answers[ELECTORS[1]] = cosign(key("a"), LOG.checkpoint(19), 7)
    with pytest.raises(PeerError, match="no quorum"):
        assemble(CHECKPOINT, answers, ELECTORS)


def test_the_time_is_the_median() -> None:
    assert cosigned("a", "b", "c", time=100).time == 101
    with pytest.raises(LocalError):
        cosign(key("a"), CHECKPOINT, MAX_TIME + 1)
    with pytest.raises(LocalError):
        cosign(key("a"), CHECKPOINT, -1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"{origin(DOMAIN)}\n1\n",
        f"{origin(DOMAIN)}\n1\n{b64encode(bytes(32)).decode()}",
        f"{origin(DOMAIN)}\n1\n{b64encode(bytes(32)).decode()}\nextension\n",
        f"{origin(DOMAIN)}\n0\n{b64encode(bytes(32)).decode()}\n",
        f"{origin(DOMAIN)}\n01\n{b64encode(bytes(32)).decode()}\n",
        f"{origin(DOMAIN)}\n-1\n{b64encode(bytes(32)).decode()}\n",
        f"{origin(DOMAIN)}\n+1\n{b64encode(bytes(32)).decode()}\n",
        f"{origin(DOMAIN)}\n¹\n{b64encode(bytes(32)).decode()}\n",
        f"{origin(DOMAIN)}\n{2**62 + 1}\n{b64encode(bytes(32)).decode()}\n",
        f"{origin(DOMAIN)}\n{'9' * 5000}\n{b64encode(bytes(32)).decode()}\n",
        f"{origin(DOMAIN)}\n1\n{b64encode(bytes(31)).decode()}\n",
        f"{origin(DOMAIN)}\n1\n{b64encode(bytes(32)).decode().rstrip('=')}\n",
        f"{origin(DOMAIN).upper()}\n1\n{b64encode(bytes(32)).decode()}\n",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PeerError):
        Checkpoint.parse(text, DOMAIN)


@given(st.integers(1, 2**62), st.binary(min_size=32, max_size=32))
def test_checkpoints_read_as_written(size: int, root: bytes) -> None:
    made = Checkpoint(DOMAIN, size, root)
    assert Checkpoint.parse(made.text, DOMAIN) == made


def test_checkpoints_of_a_growing_log_are_consistent() -> None:
    grown = EMPTY_RANGE
    for size, body in enumerate(BODIES, 1):
        grown = grown.append(body)
        assert Checkpoint(DOMAIN, size, grown.root) == LOG.checkpoint(size)
        for earlier in range(1, size + 1):
            first, second = LOG.checkpoint(earlier), LOG.checkpoint(size)
            verify_consistency(earlier, size, LOG.consistency(earlier, size), first.root, second.root)
            proof = inclusion_proof(BODIES[:size], earlier - 1)
            verify_inclusion(leaf_hash(BODIES[earlier - 1]), earlier - 1, size, proof, second.root)
    forked = ReferenceLog(DOMAIN, [*BODIES[:9], b"another", *BODIES[10:]])
    with pytest.raises(PeerError):
        verify_consistency(10, 20, forked.consistency(10, 20), LOG.checkpoint(10).root, forked.checkpoint().root)
    for size1, size2 in ((0, 5), (6, 5), (5, 0)):
        with pytest.raises(LocalError):
            LOG.consistency(size1, size2)
