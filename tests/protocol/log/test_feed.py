"""One author's chain, and the proof that it was forked."""

from __future__ import annotations

import pytest

from protocol import codec
from protocol.constants import MAX_ENTRIES_PER_ANCHOR
from protocol.errors import Evidence, LocalError, PeerError
from protocol.log.chain import FeedState
from protocol.log.entry import Entry, make
from protocol.log.fork_proof import ForkProof, evidence
from protocol.log.merkle import root
from protocol.records import Leave, Role
from tests.protocol.builders import Writer, digest

DOMAIN = digest("domain")


def grown(writer: Writer, heights: list[int]) -> FeedState:
    """The state after the writer's entries, on anchors of these heights."""
    state = FeedState(writer.node)
    for entry, height in zip(writer.entries, heights, strict=True):
        state = state.extend(entry, height)
    return state


def fork() -> tuple[Entry, Entry]:
    """Two entries for place 1 of one feed."""
    one, other = Writer("author", DOMAIN), Writer("author", DOMAIN)
    return one.append(Leave()), other.append(Role("relay"))


def test_a_feed_grows_entry_by_entry() -> None:
    writer = Writer("author", DOMAIN)
    for _ in range(5):
        writer.append(Role("relay"))
    state = grown(writer, [0, 0, 1, 1, 1, 4])
    assert (state.next_seq, state.head) == (6, writer.entries[-1].id)
    assert (state.anchor_height, state.on_anchor) == (4, 1)
    assert state.ids.root == root([entry.id for entry in writer.entries])


def test_a_gap_a_repetition_and_another_branch_are_refused() -> None:
    one, other = Writer("author", DOMAIN), Writer("author", DOMAIN)
    one.append(Role("relay"))
    one.append(Role("validator"))
    other.append(Leave())
    state = grown(Writer("author", DOMAIN), [0])
    with pytest.raises(PeerError, match="comes next"):
        state.extend(one.entries[2], 0)
    with pytest.raises(PeerError, match="comes next"):
        state.extend(one.entries[0], 0)
    with pytest.raises(PeerError, match="does not follow"):
        state.extend(other.entries[1], 0).extend(one.entries[2], 0)
    with pytest.raises(LocalError):
        state.extend(Writer("another", DOMAIN).entries[0], 0)


def test_anchors_never_go_back() -> None:
    writer = Writer("author", DOMAIN)
    writer.append(Role("relay"))
    with pytest.raises(PeerError, match="goes back"):
        grown(writer, [3, 2])


def test_256_entries_stand_on_one_anchor_at_most() -> None:
    writer = Writer("author", DOMAIN)
    for _ in range(MAX_ENTRIES_PER_ANCHOR):
        writer.append(Role("relay"))
    state = grown(Writer("author", DOMAIN), [1])
    for entry in writer.entries[1:MAX_ENTRIES_PER_ANCHOR]:
        state = state.extend(entry, 1)
    assert state.on_anchor == MAX_ENTRIES_PER_ANCHOR
    with pytest.raises(PeerError, match="on one anchor"):
        state.extend(writer.entries[-1], 1)
    assert state.extend(writer.entries[-1], 2).on_anchor == 1


def test_two_entries_for_one_place_prove_a_fork() -> None:
    a, b = fork()
    proof = ForkProof.of(a, b)
    assert proof == ForkProof.of(b, a)
    assert ForkProof.parse(proof.encode()) == proof
    assert (proof.domain, proof.author, proof.seq) == (DOMAIN, a.author, 1)
    error = evidence(proof)
    assert isinstance(error, Evidence)
    assert ForkProof.parse(error.proof) == proof


def test_what_proves_nothing_is_refused() -> None:
    a, b = fork()
    writer = Writer("author", DOMAIN)
    elsewhere = make(writer.identity, digest("another domain"), 1, a.prev, DOMAIN, Leave())
    for one, other in ((a, a), (a, writer.entries[0]), (a, elsewhere), (a, Writer("another", DOMAIN).append(Leave()))):
        with pytest.raises(PeerError, match="do not conflict"):
            ForkProof.of(one, other)
    low, high = sorted((a, b), key=lambda entry: entry.body)
    with pytest.raises(PeerError, match="ascending"):
        ForkProof.parse(codec.encode([high.body, high.signature, low.body, low.signature]))
    with pytest.raises(PeerError, match="ascending"):
        ForkProof.parse(codec.encode([a.body, a.signature, a.body, a.signature]))
    with pytest.raises(PeerError, match="signature"):
        ForkProof.parse(codec.encode([low.body, high.signature, high.body, high.signature]))


def test_every_flipped_byte_of_a_proof_is_rejected() -> None:
    raw = ForkProof.of(*fork()).encode()
    for place in range(len(raw)):
        with pytest.raises(PeerError):
            ForkProof.parse(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :])
