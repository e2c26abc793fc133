"""Nothing in node/net grows with the number of strangers, nor with that of the keys that they make up."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import trio
from libp2p.pubsub.pb import rpc_pb2

from node.net.address_text import Address
from node.net.discovery import MAX_PEERS, AddressBook
from node.net.gossip_batches import MAX_WAITING, Forwards
from node.net.gossip_memory import MAX_RECENT, MAX_SEEN, RecentMessages, Seen
from node.net.guard import peer_of
from node.net.net_limits import NetLimits
from node.net.peer_scores import MAX_PEERS as MAX_SCORES
from node.net.peer_scores import Scores
from node.net.places import Handshakes
from node.net.token_buckets import MAX_KEYS, Buckets
from protocol.errors import PeerError
from tests.node.net.helpers import (
    ECHO,
    MULTISTREAM,
    SYN,
    WINDOW,
    Attacker,
    attacker,
    gossip_stream,
    identity,
    line,
    network,
    send_rpc,
    signed,
    until,
)

TOPIC = "farflung/test/roles"
BATCH: Final = 100

BOUNDED: Final = {
    r"\._buckets$": MAX_KEYS,
    r"\.scores\._records$": MAX_SCORES,
    r"\.scores\._records\[\]": 17,
    r"\.seen_messages\._added$": MAX_SEEN,
    r"\.mcache\._kept$": MAX_RECENT,
    r"\.places\._held$": 100,  # what has ended is sorted out when the next one comes
    r"\._manager\.": 200,  # libp2p's tasks
}
"""What may grow with strangers, and how far: that it goes no further is the last test's to show."""


def containers(root: object) -> dict[str, int]:
    """The length of every container that ``root`` holds, however deep, by its way from there."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        path, thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | set | list | deque):
            found[path] = max(len(thing), found.get(path, 0))
            members = thing.values() if isinstance(thing, dict) else thing
            left += [(f"{path}[]", member) for member in list(members)]
        elif type(thing).__module__.startswith(("node.net", "libp2p")):
            left += [(f"{path}.{name}", value) for name, value in _attributes(thing)]
    return found


def _attributes(thing: object) -> Iterator[tuple[str, Any]]:
    for owner in type(thing).__mro__:
        for name in getattr(owner, "__slots__", ()):
            if hasattr(thing, name):
                yield name, getattr(thing, name)
    yield from getattr(thing, "__dict__", {}).items()


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What became longer although nothing says that it may."""

    def bound(path: str) -> int:
        bounds = (most for pattern, most in BOUNDED.items() if re.search(pattern, path))
        return next(bounds, before.get(path, 0))

    return {path: (before.get(path, 0), length) for path, length in after.items() if length > bound(path)}


def rpc_of_made_up_keys(start: int) -> bytes:
    """Topics and ids that nobody has heard of, and origins: the messages are right."""
    rpc = rpc_pb2.RPC()
    for number in range(start, start + BATCH):
        rpc.control.ihave.append(
            rpc_pb2.ControlIHave(topicID=f"ihave {number}", messageIDs=[number.to_bytes(20, "big")])
        )
        rpc.control.graft.append(rpc_pb2.ControlGraft(topicID=f"graft {number}"))
        rpc.control.prune.append(rpc_pb2.ControlPrune(topicID=f"prune {number}", backoff=1 << 40))
        rpc.publish.append(signed(number.to_bytes(32, "big"), TOPIC, b"x"))
        rpc.control.iwant.add().messageIDs.append(number.to_bytes(20, "big"))
    return bytes(rpc.SerializeToString())


async def misbehave(bad: Attacker, number: int) -> None:
    """What one identity can do to be remembered."""
    await gossip_stream(bad)
    rpc = rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=f"t {number} {n}") for n in range(20)])
    await send_rpc(bad, rpc.SerializeToString())
    await send_rpc(bad, rpc_of_made_up_keys(number * BATCH))
    await bad.frame(WINDOW, SYN, 3, 0)
    await bad.data(3, MULTISTREAM + line(ECHO.encode()) + b"\0\0\0\2hi")


async def test_identities_that_come_and_go_leave_nothing_behind() -> None:
    heard: list[bytes] = []
    async with network(1) as victim:
        victim.subscribe("roles", lambda origin, data: heard.append(origin))

        async def come_and_go(numbers: range) -> dict[str, int]:
            for number in numbers:
                async with attacker(victim, number) as bad:
                    await until(lambda bad=bad: bad.node in victim.peers)  # type: ignore[misc]
                    await misbehave(bad, number)
                    await until(lambda number=number: len(heard) == (number - 9) * BATCH)  # type: ignore[misc]
                    if number % 2:
                        await bad.frame(9, 0, 0, 0)
                await until(lambda: not victim.peers)
            return containers(victim)

        before = await come_and_go(range(10, 15))
        assert len(before) > 100
        after = await come_and_go(range(15, 25))
        assert grown(before, after) == {}
        assert victim.restarts == 0


async def test_thousands_of_made_up_keys_on_one_connection_leave_nothing_behind() -> None:
    heard: list[bytes] = []
    async with network(1) as victim:
        victim.subscribe("roles", lambda origin, data: heard.append(origin))
        async with attacker(victim) as bad:
            await until(lambda: bad.node in victim.peers)
            await gossip_stream(bad)

            async def send(numbers: range) -> dict[str, int]:
                for number in numbers:
                    await send_rpc(bad, rpc_of_made_up_keys(number * BATCH))
                    await until(lambda number=number: len(heard) == (number + 1) * BATCH)  # type: ignore[misc]
                return containers(victim)

            before = await send(range(10))
            after = await send(range(10, 30))
            assert grown(before, after) == {}
            assert victim.scores.reasons(bad.node) == {}


def _book() -> tuple[AddressBook, Callable[[int], None]]:
    book = AddressBook(bytes(32))

    def learn(number: int) -> None:
        book.learn(key(number), [Address("ip4", "192.0.2.1", 1 + number % 60_000, key(number))], float(number))

    return book, learn


def _handshakes() -> tuple[Handshakes, Callable[[int], None]]:
    pending = Handshakes(NetLimits())
    return pending, lambda number: _ignore(
        pending.begin(f"{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}.1", float(number), lambda: None)
    )


def _ignore(_: object) -> None: ...


def key(number: int) -> bytes:
    return (number + 1).to_bytes(32, "big")


def message(number: int) -> Any:
    origin = peer_of(identity(9).node).to_bytes()
    return rpc_pb2.Message(data=b"x", topicIDs=[TOPIC], from_id=origin, seqno=number.to_bytes(8, "big"))


def _kept() -> dict[str, tuple[Any, Callable[[int], None], int]]:
    """By what it is: a keeper of keys that strangers choose, how it gets one, and how many it keeps."""
    buckets, scores, seen, recent = Buckets(1, 1), Scores(), Seen(), RecentMessages(3, 5)
    forwards = Forwards(1.0, lambda peer, messages: None)
    book, learn = _book()
    pending, begin = _handshakes()
    return {
        "buckets": (buckets, lambda number: _ignore(buckets.take(key(number), 1, float(number))), MAX_KEYS),
        "scores": (
            scores,
            lambda number: _ignore(scores.blame(key(number), PeerError("x"), float(number))),
            MAX_SCORES,
        ),
        "seen": (seen, lambda number: _ignore(seen.add(key(number))), MAX_SEEN),
        "recent": (recent, lambda number: recent.put(message(number)), MAX_RECENT),
        "forwards": (forwards, lambda number: forwards.add(key(number), message(number), []), MAX_WAITING),
        "addresses": (book.entries, learn, MAX_PEERS),
        "handshakes": (pending, begin, NetLimits().handshakes),
        "neighbourhoods": (pending.counts, begin, NetLimits().handshakes),
    }


@pytest.mark.parametrize("what", sorted(_kept()))
async def test_what_is_kept_by_made_up_keys_is_flat_beyond_its_bound(what: str, autojump_clock: object) -> None:
    keeper, add, most = _kept()[what]
    lengths = set()
    for number in range(most + 5000):
        add(number)
        if number >= most:
            lengths.add(len(keeper))
    assert max(lengths) <= most
    assert len(lengths) == 1 or what == "forwards"  # those leave when they are as many as may wait
    await trio.lowlevel.checkpoint()
