"""Whether a node runs elsewhere, asked of real hosts over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import trio

from node.net.host import Network, open_network
from node.peers import twins
from node.peers.twins import Sighting
from protocol.errors import PeerError
from protocol.identity import Identity
from protocol.work.presence import Presence

DOMAIN = bytes([7]) * 32
NODE = Identity(bytes([1]) * 32)
INTERVAL = 0.05


def presence(boot: int, counter: int, identity: Identity = NODE, domain: bytes = DOMAIN) -> bytes:
    return Presence(
        domain=domain,
        node=identity.node,
        boot=boot,
        counter=counter,
        name="n",
        role="none",
        willing=(),
        addresses=("/ip4/192.0.2.7/tcp/4001",),
        bulk=(),
        versions=(),
        arriving=(),
        cpus=1,
        memory_mb=1,
        gpu_mb=0,
        tokens_per_second=0,
        bandwidth_kbps=0,
        load=0,
        paused=0,
    ).sign(identity)


class Heard:
    """What one peer says it heard: one answer after the other, the last for ever."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)

    def signed(self, node: bytes) -> bytes:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@asynccontextmanager
async def asking(*peers: Heard) -> AsyncIterator[Network]:
    """A host that is connected to one host for each of ``peers``."""
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(
            open_network(Identity(bytes([99]) * 32), listen=(), domain_tag="liveness")
        )
        for number, heard in enumerate(peers):
            identity = Identity(bytes([100 + number]) * 32)
            network = await stack.enter_async_context(
                open_network(identity, listen=("/ip4/127.0.0.1/tcp/0",), domain_tag="liveness")
            )
            twins.serve(network, heard)  # type: ignore[arg-type]
            await asker.connect(network.addresses[0], timeout=5)
        yield asker


async def sight(network: Network) -> Sighting:
    return await twins.sight(network, network.peers, DOMAIN, NODE.node, INTERVAL)


async def test_a_node_that_nobody_hears_runs_nowhere() -> None:
    async with asking(Heard(b""), Heard(b"")) as network:
        assert await sight(network) == Sighting(2, 0, None)


async def test_a_last_presence_from_before_a_restart_is_not_life() -> None:
    async with asking(Heard(presence(1, 5))) as network:
        found = await sight(network)
    assert (found.answered, found.alive, found.elsewhere) == (1, 0, False)
    assert found.presence is not None
    assert found.presence.counter == 5


@pytest.mark.parametrize("later", [(1, 6), (2, 1)])
async def test_a_node_that_goes_on_counting_runs_elsewhere(later: tuple[int, int]) -> None:
    async with asking(Heard(presence(1, 5), presence(*later))) as network:
        found = await sight(network)
    assert found.elsewhere
    assert found.presence is not None
    assert (found.presence.boot, found.presence.counter) == later


@pytest.mark.parametrize("ours", [True, False])
async def test_of_two_copies_that_count_alike_the_other_is_seen(ours: bool) -> None:
    async with asking(Heard(presence(2, 1), presence(2, 2))) as network:
        found = await twins.sight(
            network, network.peers, DOMAIN, NODE.node, INTERVAL, lambda heard: ours and heard.counter == 2
        )
    assert found.elsewhere != ours


async def test_one_peer_of_three_cannot_tell_a_node_dead_by_replaying_its_past() -> None:
    async with asking(Heard(presence(1, 5), presence(1, 6)), Heard(b""), Heard(presence(1, 6))) as network:
        found = await sight(network)
    assert (found.answered, found.alive, found.elsewhere) == (3, 1, False)


@pytest.mark.parametrize(
    "answer",
    [b"rubbish", presence(1, 1, Identity(bytes([2]) * 32)), presence(1, 1, domain=bytes(32)), presence(1, 1)[:-1]],
)
async def test_rubbish_is_blamed_and_no_answer(answer: bytes) -> None:
    async with asking(Heard(answer)) as network:
        (peer,) = network.peers
        assert await sight(network) == Sighting(0, 0, None)
        assert sum(network.scores.reasons(peer).values()) == 1


async def test_a_question_that_is_no_node_id_is_refused() -> None:
    handlers: dict[str, Callable[[bytes, bytes], object]] = {}

    class Port:
        def serve(self, protocol: str, handler: Callable[[bytes, bytes], object], *, max_request: int) -> None:
            handlers[protocol] = handler

    twins.serve(Port(), Heard(b"x"))  # type: ignore[arg-type]
    answer = handlers[twins.PROTOCOL]
    assert await answer(b"", bytes(32)) == b"x"  # type: ignore[misc]
    with pytest.raises(PeerError):
        await answer(b"", bytes(31))  # type: ignore[misc]
    await trio.lowlevel.checkpoint()


def test_no_answer_is_no_majority() -> None:
    assert not Sighting(0, 0, None).elsewhere
    assert not replace(Sighting(4, 2, None)).elsewhere
    assert Sighting(3, 2, None).elsewhere
