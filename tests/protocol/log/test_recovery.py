"""Recovery keys: what they sign, which feeds end, and who goes on for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec, identity
from protocol.constants import FORMAT
from protocol.errors import LocalError, PeerError
from protocol.identity import Identity
from protocol.log import entry, recovery
from protocol.log.endings import Endings, FeedEnding
from protocol.log.entry import Entry
from protocol.records import Close, Leave, Rebind, Record
from tests.protocol.builders import digest, key
from tests.protocol.strategies import ids, values

DOMAIN = digest("domain")


def node(name: str) -> bytes:
    """A node id."""
    return key(name).node


def secret(name: str) -> Identity:
    """The recovery key of a node."""
    return key(f"recovery {name}")


def committed(author: bytes) -> bytes | None:
    """What the joins of nodes a to e say; all others did not join."""
    for name in "abcde":
        if author == node(name):
            return recovery.commitment(secret(name).node)
    return None


def said(author: str, payload: Record) -> Entry:
    """An entry of ``author``'s feed."""
    return entry.make(key(author), DOMAIN, 1, digest("prev"), DOMAIN, payload)


def closes(author: str, target: str, by: str = "") -> Entry:
    """``author`` closes ``target`` with the recovery key of ``by``, the target's own where empty."""
    return said(author, recovery.close(secret(by or target), DOMAIN, node(target), node(author)))


def rebinds(author: str, target: str, by: str = "") -> Entry:
    """``author`` takes over from ``target``."""
    return said(author, recovery.rebind(secret(by or target), DOMAIN, node(target), node(author)))


def after(*cuts: Sequence[Entry]) -> Endings:
    """What follows from these entries, cut by cut."""
    endings = Endings()
    for height, covered in enumerate(cuts, 1):
        endings.cover(height, covered, committed)
    return endings


@pytest.mark.parametrize("make", [closes, rebinds])
def test_every_flipped_byte_of_an_entry_is_rejected(make: Callable[[str, str], Entry]) -> None:
    raw = make("a", "b").encode()
    assert entry.decode(raw).encode() == raw
    for place in range(len(raw)):
        with pytest.raises(PeerError):
            entry.decode(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :])


def test_the_statement_is_of_one_kind_domain_target_and_author() -> None:
    message = codec.encode([FORMAT, DOMAIN, node("b"), node("a")])
    good = secret("b").sign(identity.REBIND, message)
    assert recovery.rebind(secret("b"), DOMAIN, node("b"), node("a")) == Rebind(node("b"), secret("b").node, good)
    recovery.check(Rebind(node("b"), secret("b").node, good), DOMAIN, node("a"))
    for record, domain, author in (
        (Close(node("b"), secret("b").node, good), DOMAIN, node("a")),
        (Rebind(node("c"), secret("b").node, good), DOMAIN, node("a")),
        (Rebind(node("b"), secret("c").node, good), DOMAIN, node("a")),
        (Rebind(node("b"), secret("b").node, good), digest("another domain"), node("a")),
        (Rebind(node("b"), secret("b").node, good), DOMAIN, node("c")),
    ):
        with pytest.raises(PeerError, match="signature"):
            recovery.check(record, domain, author)


def test_an_entry_without_the_signature_is_none_even_unverified() -> None:
    record = recovery.close(secret("b"), DOMAIN, node("b"), node("a"))
    with pytest.raises(LocalError):
        said("c", record)
    body = codec.encode([FORMAT, DOMAIN, node("c"), 1, digest("prev"), DOMAIN, "close", record.to_value()])
    with pytest.raises(PeerError, match="close: the signature is wrong"):
        entry.parse(body, bytes(64), verify=False)


def test_a_node_does_not_take_over_from_itself() -> None:
    with pytest.raises(LocalError):
        recovery.rebind(secret("a"), DOMAIN, node("a"), node("a"))
    signature = secret("a").sign(identity.REBIND, codec.encode([FORMAT, DOMAIN, node("a"), node("a")]))
    with pytest.raises(PeerError, match="itself"):
        recovery.check(Rebind(node("a"), secret("a").node, signature), DOMAIN, node("a"))
    assert after([closes("a", "a")]).ended == {node("a"): FeedEnding(1, None, 0)}


def test_a_close_ends_a_feed_once() -> None:
    endings = Endings()
    assert endings.cover(3, [said("a", Leave()), closes("a", "b")], committed) == [node("b")]
    assert endings.cover(4, [closes("c", "b")], committed) == []
    assert endings.ended == {node("b"): FeedEnding(3, None, 0)}
    assert endings.owner(node("b")) == node("b")
    assert endings.lost(node("a")) == []


def test_without_the_committed_key_nothing_ends_then_or_later() -> None:
    assert after([closes("a", "b", by="c")], [rebinds("a", "b", by="c")]).ended == {}
    # The target has not joined, as far as that cut covers.
    assert after([closes("a", "stranger")], [rebinds("a", "stranger")]).ended == {}


def test_a_closed_node_is_rebound_and_keeps_its_end() -> None:
    endings = after([closes("a", "b")], [], [rebinds("c", "b")])
    assert endings.ended == {node("b"): FeedEnding(1, node("c"), 3)}
    assert endings.owner(node("b")) == node("c")
    assert [list(endings.at(height)) for height in range(5)] == [[], [node("b")], [], [node("b")], []]
    both = after([rebinds("c", "b"), closes("a", "b")])
    assert both.ended == {node("b"): FeedEnding(1, node("c"), 1)}
    assert list(both.at(1)) == [node("b")]


def test_the_first_of_several_rebinds_counts() -> None:
    assert after([rebinds("c", "b")], [rebinds("d", "b")]).owner(node("b")) == node("c")
    one, other = rebinds("c", "b"), rebinds("d", "b")
    first = min((one, other), key=lambda made: made.id).author
    assert after([one, other]).owner(node("b")) == after([other, one]).owner(node("b")) == first


def test_credit_goes_along_a_chain() -> None:
    endings = after([rebinds("b", "a")], [rebinds("c", "b")], [rebinds("c", "d")])
    assert [endings.owner(node(name)) for name in "abcde"] == [node(name) for name in "cccce"]
    assert endings.lost(node("c")) == sorted(map(node, "abd"))
    assert endings.lost(node("b")) == []
    # In the cuts of the past it had not moved yet.
    assert [endings.owner(node("a"), height) for height in range(4)] == [node(name) for name in "abcc"]
    assert [endings.lost(node("c"), height) for height in range(4)] == [
        [],
        [],
        sorted(map(node, "ab")),
        sorted(map(node, "abd")),
    ]
    assert [endings.lost(node("b"), height) for height in range(4)] == [[], [node("a")], [], []]


def test_a_chain_may_come_in_one_cut_and_never_closes_to_a_ring() -> None:
    for order in ([rebinds("b", "a"), rebinds("c", "b")], [rebinds("c", "b"), rebinds("b", "a")]):
        assert after(order).owner(node("a")) == node("c")
    ring = after([rebinds("b", "a"), rebinds("a", "b")])
    owners = {ring.owner(node("a")), ring.owner(node("b"))}
    assert len(owners) == 1
    assert after([rebinds("b", "a")], [rebinds("c", "b")], [rebinds("a", "c")]).owner(node("c")) == node("c")


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([closes, rebinds]), st.sampled_from("abcde"), st.sampled_from("abcde")).filter(
            lambda made: made[1] != made[2]
        ),
        max_size=8,
    ),
    st.data(),
)
def test_the_order_within_a_cut_does_not_matter(
    made: list[tuple[Callable[[str, str], Entry], str, str]], data: st.DataObject
) -> None:
    entries = [make(author, target) for make, author, target in made]
    middle = data.draw(st.integers(0, len(entries)))
    first, second = entries[:middle], entries[middle:]
    endings = after(first, second)
    again = after(data.draw(st.permutations(first)), data.draw(st.permutations(second)))
    assert again.to_value() == endings.to_value()
    assert Endings.from_value(codec.decode(codec.encode(endings.to_value()), max_bytes=4096)).ended == endings.ended
    for height in (0, 1, 2, None):
        owners = {endings.owner(node(name), height) for name in "abcde"}
        # Everybody's work counts once.
        held = [author for owner in owners for author in (owner, *endings.lost(owner, height))]
        assert sorted(held) == sorted(map(node, "abcde"))


heights = st.integers(0, 5)


@given(values | st.lists(st.tuples(ids, heights, st.none() | ids, heights).map(list), max_size=4))
def test_any_value_is_endings_or_refused(value: object) -> None:
    value = codec.decode(codec.encode(value), max_bytes=1 << 16)
    try:
        endings = Endings.from_value(value)
    except PeerError:
        return
    assert endings.to_value() == value


def test_a_ring_is_refused() -> None:
    rows = sorted([[node("a"), 1, node("b"), 1], [node("b"), 1, node("a"), 1]])
    with pytest.raises(PeerError, match="circle"):
        Endings.from_value(rows)
