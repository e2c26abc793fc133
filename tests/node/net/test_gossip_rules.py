"""What one gossip RPC may hold."""

from __future__ import annotations

from typing import Any

import pytest
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.pubsub.pb import rpc_pb2

from node.net.gossip_rules import (
    MAX_IDS,
    MAX_TOPIC,
    check_items,
    check_message,
    spoken,
    unique_ids,
)
from node.net.guard import peer_of
from protocol.errors import PeerError
from tests.node.net.helpers import identity

ORIGIN = identity(7)


def message(**others: Any) -> Any:
    """A message like those that nodes send, except for ``others``."""
    fields: dict[str, Any] = {
        "data": b"x",
        "topicIDs": ["t" * MAX_TOPIC],
        "from_id": peer_of(ORIGIN.node).to_bytes(),
        "seqno": bytes(8),
        "signature": bytes(64),
        "key": create_new_key_pair(seed=ORIGIN.seed).public_key.serialize(),
    }
    return rpc_pb2.Message(**(fields | others))


@pytest.mark.parametrize("data", [b"", bytes(100), bytes(256 << 10)])
def test_a_message_of_any_length_with_the_longest_topic_is_fine(data: bytes) -> None:
    check_message(message(data=data))
    check_message(message(data=data, key=b""))


@pytest.mark.parametrize(
    "others",
    [
        {"seqno": bytes(900_000)},
        {"seqno": b""},
        {"signature": bytes(65)},
        {"signature": b""},
        {"key": bytes(36)},
        {"key": bytes(900_000)},
        {"from_id": peer_of(ORIGIN.node).to_bytes() + b"\0"},
        {"from_id": b"\x12\x20" + bytes(32)},
        {"from_id": b""},
        {"topicIDs": ["t" * MAX_TOPIC] * 4},
    ],
    ids=lambda others: next(iter(others)),
)
def test_a_field_of_another_size_is_refused(others: dict[str, Any]) -> None:
    with pytest.raises(PeerError):
        check_message(message(**others))


def test_fields_that_nobody_knows_are_refused() -> None:
    """protobuf keeps them, so that they would be forwarded."""
    padded = rpc_pb2.Message()
    padded.ParseFromString(message().SerializeToString() + b"\xfa\x7f\x90\x4e" + bytes(10_000))
    assert padded.ByteSize() > 10_000
    with pytest.raises(PeerError, match="more than belongs"):
        check_message(padded)


def test_an_rpc_with_too_many_items_or_a_long_topic_is_refused() -> None:
    check_items(rpc_pb2.RPC(publish=[message()] * 256))
    with pytest.raises(PeerError):
        check_items(rpc_pb2.RPC(publish=[message()] * 257))
    many = rpc_pb2.RPC()
    many.control.prune.extend(rpc_pb2.ControlPrune() for _ in range(257))
    with pytest.raises(PeerError):
        check_items(many)
    with pytest.raises(PeerError):
        check_items(rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(topicid="t" * (MAX_TOPIC + 1))]))


def test_ids_count_once_and_are_bounded_over_all_lists_of_an_rpc() -> None:
    one, other = bytes(20), b"\1" * 20
    wants = [rpc_pb2.ControlIWant(messageIDs=[one, other, one]), rpc_pb2.ControlIWant(messageIDs=[one] * 500)]
    assert unique_ids(wants) == [one, other]
    with pytest.raises(PeerError, match="too many ids"):
        unique_ids([*wants, rpc_pb2.ControlIWant(messageIDs=[one] * (MAX_IDS - 502))])
    with pytest.raises(PeerError, match="another size"):
        unique_ids([rpc_pb2.ControlIWant(messageIDs=[bytes(21)])])


def test_only_what_is_about_spoken_topics_is_left_and_once_for_each() -> None:
    prunes = [rpc_pb2.ControlPrune(topicID=topic, backoff=number) for number, topic in enumerate("abcab")]
    assert [(prune.topicID, prune.backoff) for prune in spoken(prunes, {"a", "c"})] == [("a", 3), ("c", 2)]
