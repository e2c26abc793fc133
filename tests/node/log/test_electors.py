"""Four electors over lossy links: cuts go on with one of them silent, lying or restored, and never contradict."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from node.errors import UserError
from node.log import elector_messages as wire
from node.log.elector import Elector, open_elector
from node.log.voter import META
from node.net.requests import Refused
from protocol import codec
from protocol.errors import PeerError
from protocol.identity import Identity
from protocol.log import quorum as ballots
from protocol.log.amendment import Amendment
from protocol.log.elector_state import ElectorState
from protocol.log.heads import Head, heads_root
from protocol.log.proposal import proposer
from protocol.log.quorum import Cut, PreparedCut, Report, commit, quorum, vote
from protocol.log.turns import JUMP
from protocol.records import Leave, Role
from tests.protocol.builders import digest, key, small_domain
from tests.simulator import Disk, Network, SimNode, World, converge, open_world

NAMES = ("e1", "e2", "e3", "e4")
DOMAIN = small_domain(NAMES)
PACE = DOMAIN.timings.epoch_ms / 1000


@pytest.fixture
def votes(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[bytes, int, bool], set[bytes]]:
    """What every honest elector signed, by (elector, epoch, whether it is a commit). Never two in one place."""
    signed: dict[tuple[bytes, int, bool], set[bytes]] = {}

    def recording(sign: Callable[..., tuple[bytes, bytes]], committed: bool) -> Callable[..., tuple[bytes, bytes]]:
        def record(identity: Identity, cut: Cut, epoch: int) -> tuple[bytes, bytes]:
            signed.setdefault((identity.node, epoch, committed), set()).add(cut.id)
            return sign(identity, cut, epoch)

        return record

    monkeypatch.setattr(ballots, "vote", recording(vote, False))
    monkeypatch.setattr(ballots, "commit", recording(commit, True))
    return signed


@asynccontextmanager
async def electors(network: Network | None = None, *, count: int = 4) -> AsyncIterator[tuple[World, list[SimNode]]]:
    async with open_world(DOMAIN, network or Network()) as world:
        yield world, [await world.start(key(name)) for name in NAMES[:count]]


async def write(node: SimNode, count: int = 1) -> None:
    for _ in range(count):
        await node.service.append(Role("relay"))


def heights(nodes: list[SimNode]) -> list[int]:
    return [len(node.service.replica.cuts) for node in nodes]


async def progress(nodes: list[SimNode], cuts: int = 3, within: float = 60.0) -> None:
    """Entries of every node become final, several times over."""
    with trio.fail_after(within):
        for _ in range(cuts):
            for node in nodes:
                await write(node)
            while any(node.service.replica.uncovered() for node in nodes):  # noqa: ASYNC110  several replicas change
                await trio.sleep(0.1)


def agree(nodes: list[SimNode]) -> None:
    """One chain of cuts, each certified by a quorum."""
    chains = [[cut.cut.id for cut in node.service.replica.cuts] for node in nodes]
    assert len({tuple(chain[: min(map(len, chains))]) for chain in chains}) == 1
    for node in nodes:
        assert all(len(cut.votes) >= quorum(4) for cut in node.service.replica.cuts)


def abstains(node: SimNode) -> bool:
    return elector_of(node).voter.state.abstains is not None


def elector_of(node: SimNode) -> Elector:
    assert node.elector is not None
    return node.elector


async def test_they_take_turns_and_agree(
    votes: dict[tuple[bytes, int, bool], set[bytes]], autojump_clock: trio.testing.MockClock
) -> None:
    async with electors() as (world, nodes):
        outsider = await world.start(key("a"))
        began = trio.current_time()
        await progress([*nodes, outsider], 6, within=12 * PACE)
        assert trio.current_time() - began < 12 * PACE
        await converge([*nodes, outsider])
        agree([*nodes, outsider])
        proposers = [proposer(cut.epoch, DOMAIN.electors) for cut in outsider.service.replica.cuts]
        assert len(set(proposers)) == 4
        assert all(not node.port.blamed for node in nodes)
        height = heights(nodes)[0]
        await trio.sleep(20 * PACE)
        assert heights(nodes) == [height] * 4  # nothing changed, nothing is cut
    assert all(len(cuts) == 1 for cuts in votes.values())


@pytest.mark.parametrize("silent", range(4))
async def test_one_silent_elector_costs_time_only(silent: int, autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (world, nodes):
        await progress(nodes, 1)
        gone = nodes.pop(silent)
        disk = world.crash(gone)
        await progress(nodes, 4, within=20 * PACE)
        agree(nodes)
        back = await world.start(gone.identity, disk, known=[node.id for node in nodes])
        await progress([*nodes, back], 4, within=20 * PACE)
        await converge([*nodes, back])
        agree([*nodes, back])
        assert any(back.id in dict(cut.votes) for cut in back.service.replica.cuts[-4:])


async def test_one_that_hangs_costs_time_only(autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (_, nodes):

        async def hang(peer: bytes, data: bytes) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        nodes[1].port.handlers[elector_of(nodes[1]).voter.protocol] = hang
        await progress(nodes, 4, within=30 * PACE)
        await converge(nodes)
        agree(nodes)


async def test_two_silent_electors_stop_cuts_until_one_is_back(autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (world, nodes):
        await progress(nodes, 1)
        disks = [world.crash(node) for node in nodes[2:]]
        await write(nodes[0])
        await trio.sleep(30 * PACE)
        stopped = heights(nodes[:2])
        assert stopped[0] == stopped[1]
        assert nodes[0].service.replica.uncovered()
        back = await world.start(nodes[3].identity, disks[1], known=[nodes[0].id])
        three = [*nodes[:2], back]
        await progress(three, 2, within=40 * PACE)
        agree(three)


async def test_a_partition_stops_cuts_and_heals(
    votes: dict[tuple[bytes, int, bool], set[bytes]], autojump_clock: trio.testing.MockClock
) -> None:
    async with electors() as (world, nodes):
        await progress(nodes, 1)
        world.network.partition([node.id for node in nodes[:2]], [node.id for node in nodes[2:]])
        for node in nodes:
            await write(node)
        await trio.sleep(20 * PACE)
        assert all(node.service.replica.uncovered() for node in nodes)
        world.network.heal()
        await progress(nodes, 2, within=40 * PACE)
        await converge(nodes)
        agree(nodes)
    assert all(len(cuts) == 1 for cuts in votes.values())


@pytest.mark.parametrize("seed", range(4))
async def test_lossy_links(
    seed: int, votes: dict[tuple[bytes, int, bool], set[bytes]], autojump_clock: trio.testing.MockClock
) -> None:
    async with electors(Network(seed, loss=0.15, delay=0.3)) as (_, nodes):
        await progress(nodes, 3, within=400 * PACE)
        agree(nodes)
    assert all(len(cuts) == 1 for cuts in votes.values())


async def test_all_start_cold(autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (world, nodes):
        await progress(nodes, 2)
        disks = [world.crash(node) for node in nodes]
        known = [node.id for node in nodes]
        again = [await world.start(node.identity, disk, known=known) for node, disk in zip(nodes, disks, strict=True)]
        await progress(again, 2, within=30 * PACE)
        agree(again)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("write_number", range(4))
async def test_a_crash_between_storing_and_sending(
    moment: str,
    write_number: int,
    votes: dict[tuple[bytes, int, bool], set[bytes]],
    autojump_clock: trio.testing.MockClock,
) -> None:
    """An elector dies around a write of its state: what it signed before is never signed differently."""

    async with electors() as (world, nodes):
        await progress(nodes, 1)
        await write(nodes[0])
        victim, count, backup = nodes[2], write_number, list[Disk]()
        disk = victim.disk

        def kill() -> None:
            nonlocal count
            count -= 1
            if count == -1:
                # Whatever still runs of it reaches neither its disk nor anybody.
                backup.append(world.crash(victim))
            if count < 0:
                raise OSError("it is dead")

        setattr(disk, moment, kill)
        await trio.sleep(3 * PACE)
        rest = [*nodes[:2], nodes[3]]
        again = await world.start(victim.identity, backup[0].copy(), known=[node.id for node in rest])
        await progress([*rest, again], 3, within=40 * PACE)
        agree([*rest, again])
        assert not abstains(again)
    assert all(len(cuts) == 1 for cuts in votes.values())


async def test_a_restored_elector_abstains_until_the_others_went_on(
    votes: dict[tuple[bytes, int, bool], set[bytes]], autojump_clock: trio.testing.MockClock
) -> None:
    async with electors() as (world, nodes):
        await progress(nodes, 1)
        backup = nodes[3].disk.copy()
        await progress(nodes[:3], 3)
        await trio.sleep(2 * PACE)
        assert any(nodes[3].id in dict(cut.votes) for cut in nodes[0].service.replica.cuts[-3:])
        world.crash(nodes[3])
        restored = await world.start(nodes[3].identity, backup, known=[node.id for node in nodes[:3]])
        await trio.sleep(4 * PACE)
        await converge([*nodes[:3], restored])
        assert abstains(restored)
        before = heights(nodes[:1])[0]
        signed = {place for place in votes if place[0] == restored.id}
        await progress(nodes[:3], 2)
        await trio.sleep(2 * PACE)
        assert not abstains(restored)
        first = nodes[0].service.replica.cuts[before]
        assert restored.id not in dict(first.votes)
        assert all(epoch > first.epoch for _, epoch, _ in {p for p in votes if p[0] == restored.id} - signed)
        await progress([*nodes[:3], restored], 4)
        assert any(restored.id in dict(cut.votes) for cut in nodes[0].service.replica.cuts[-4:])
        agree([*nodes[:3], restored])
    assert all(len(cuts) == 1 for cuts in votes.values())


async def test_an_elector_that_lost_everything_abstains(autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (world, nodes):
        await progress(nodes, 2)
        world.crash(nodes[0])
        wiped = await world.start(nodes[0].identity, Disk(), known=[node.id for node in nodes[1:]], join=False)
        await trio.sleep(5 * PACE)
        assert abstains(wiped)
        await progress([*nodes[1:], wiped], 3, within=40 * PACE)
        assert not abstains(wiped)
        agree([*nodes[1:], wiped])


async def test_an_abstention_outlives_a_restart(autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (world, nodes):
        await progress(nodes, 2)
        world.crash(nodes[0])
        wiped = await world.start(nodes[0].identity, Disk(), known=[node.id for node in nodes[1:]], join=False)
        await trio.sleep(5 * PACE)
        disk = world.crash(wiped)
        assert ElectorState.decode(disk.values[META]).abstains is not None
        again = await world.start(nodes[0].identity, disk, known=[node.id for node in nodes[1:]])
        await trio.sleep(5 * PACE)
        assert elector_of(again).voter.away() == "it abstains, for a part of its past is lost"


async def test_a_full_disk_signs_nothing(
    votes: dict[tuple[bytes, int, bool], set[bytes]], autojump_clock: trio.testing.MockClock
) -> None:
    async with electors() as (_, nodes):
        await progress(nodes, 1)
        nodes[1].disk.full = True
        before = {place for place in votes if place[0] == nodes[1].id}
        others = [nodes[0], *nodes[2:]]
        await progress(others, 3, within=30 * PACE)
        assert {place for place in votes if place[0] == nodes[1].id} == before
        nodes[1].disk.full = False
        await progress(nodes, 2, within=30 * PACE)
        agree(nodes)


# Liars

Lie = Callable[[SimNode, bytes, str, object], bytes | None]


def row(author: str) -> Head:
    return Head(digest(author), 7, digest("entry"), digest("root"))


def forged_report(node: SimNode, peer: bytes, op: str, argument: object) -> bytes | None:
    """Another elector's name, or rows that nobody wrote."""
    if op != "report":
        return None
    assert isinstance(argument, list)
    newest = node.service.replica.newest_cut_id
    report = Report(DOMAIN.id, node.id, argument[0], newest, (row("x"),), 9, 9)
    wrong = Report(DOMAIN.id, key("e1").node, argument[0], newest, (), 0, 0)
    return wire.answer([(report.sign(node.identity) if peer[0] % 2 else wrong.sign(key("e1"))), None])


def false_votes(node: SimNode, peer: bytes, op: str, argument: object) -> bytes | None:
    """Signatures over something else."""
    return wire.answer(bytes(64)) if op in ("propose", "prepared") else None


def nonsense(node: SimNode, peer: bytes, op: str, argument: object) -> bytes | None:
    return b"\xc1" * 40


def giant_refusals(node: SimNode, peer: bytes, op: str, argument: object) -> bytes | None:
    """It claims to be far ahead of everybody."""
    if op == "status":
        return wire.status(wire.Reached(2**61, 2**61, 2**61, None))
    return wire.answer(wire.Refusal("no", 2**61, 2**61, 2**61))


def lie(node: SimNode, how: Lie) -> None:
    """Let an elector answer like this."""
    protocol = elector_of(node).voter.protocol
    honest = node.port.handlers[protocol]

    async def handle(peer: bytes, data: bytes) -> bytes:
        answer = how(node, peer, *wire.parse_request(data))
        return await honest(peer, data) if answer is None else answer

    node.port.handlers[protocol] = handle


@pytest.mark.parametrize("how", [forged_report, false_votes, nonsense, giant_refusals])
async def test_lying_answers_delay_and_are_blamed(how: Lie, autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (_, nodes):
        await progress(nodes, 1)
        lie(nodes[1], how)
        honest = [nodes[0], *nodes[2:]]
        await progress(honest, 4, within=40 * PACE)
        agree(honest)
        if how is not giant_refusals:
            assert {peer for node in honest for peer, _ in node.port.blamed} == {nodes[1].id}
        assert max(cut.epoch for cut in nodes[0].service.replica.cuts) < 200


async def send(liar: SimNode, peer: SimNode, payload: bytes) -> object:
    """A request of the liar's; what it brings does not matter to it."""
    protocol = elector_of(liar).voter.protocol
    try:
        return await liar.port.request(peer.id, protocol, payload, timeout=1, max_response=wire.MAX_MESSAGE)
    except Refused as error:
        return str(error)


async def test_a_lying_proposer_corrupts_nothing(
    votes: dict[tuple[bytes, int, bool], set[bytes]], autojump_clock: trio.testing.MockClock
) -> None:
    """It proposes ever higher epochs, out of turn, wrong roots, and different cuts to different electors."""
    async with electors() as (world, nodes):
        await progress(nodes, 1)
        liar, honest = nodes[3], nodes[:3]
        place = DOMAIN.electors.index(liar.id)
        elector_of(liar).cut = trio.sleep_forever  # type: ignore[method-assign]  # it has better to do
        epoch = 1000 + (place - 1000) % 4

        async def rage() -> None:
            nonlocal epoch
            while True:
                epoch += 4
                replica = liar.service.replica
                held = sorted(replica.reportable(), key=lambda head: head.author)
                for number, node in enumerate(honest):
                    await send(liar, node, wire.request("report", [epoch, len(replica.cuts)]))
                    rows = held[: 1 + number] or [row("x")]
                    vector = {**replica.certified, **{head.author: head for head in rows}}
                    root = heads_root(vector.values()) if number else digest("wrong")
                    cut = Cut.make(DOMAIN.id, len(replica.cuts) + 1, replica.newest_cut_id, root, rows)
                    await send(liar, node, wire.request("propose", wire.proposal(epoch, cut, None)))
                await trio.sleep(0.05)

        world.nursery.start_soon(rage)
        await progress(honest, 6, within=120 * PACE)
        agree(honest)
    assert all(len(cuts) == 1 for (node, _, _), cuts in votes.items() if node != liar.id)


async def test_one_that_was_talked_into_a_high_epoch_is_not_lost(autojump_clock: trio.testing.MockClock) -> None:
    """A liar has one elector vote as high as it may, and then says nothing any more."""
    async with electors() as (world, nodes):
        await progress(nodes, 1)
        liar, victim, *others = nodes
        for node in nodes:
            await write(node)
        await trio.sleep(PACE / 2)
        voter = elector_of(victim).voter
        replica = victim.service.replica
        place = DOMAIN.electors.index(liar.id)
        rows = replica.reportable()
        root = heads_root({**replica.certified, **{head.author: head for head in rows}}.values())
        cut = Cut.make(DOMAIN.id, len(replica.cuts) + 1, replica.newest_cut_id, root, rows)
        epoch = voter.turns.limit(trio.current_time())
        epoch -= (epoch - place) % 4
        assert isinstance(await voter.vote(cut, epoch, None), bytes)
        assert voter.state.epoch > JUMP - 8
        world.crash(liar)
        three = [victim, *others]
        await progress(three, 3, within=60 * PACE)
        await converge(three)
        agree(three)
        assert replica.cuts[-1].epoch > epoch
        assert all(not node.port.blamed for node in three)


async def test_what_breaks_the_protocol_is_blamed(autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (world, nodes):
        await progress(nodes, 1)
        liar, victim = nodes[0], nodes[1]
        state = elector_of(victim).voter.state
        own = DOMAIN.electors.index(liar.id)
        epoch = state.epoch + 4 - (state.epoch - own) % 4
        replica = victim.service.replica
        elsewhere = Cut.make(digest("d"), 1, digest("d"), bytes(32), [row("x")])
        for payload in (
            b"",
            codec.encode([1, "nothing", None]),
            wire.request("report", [epoch + 1, len(replica.cuts)]),
            wire.request("report", [epoch + 2**50, len(replica.cuts)]),
            wire.request("propose", wire.proposal(epoch, elsewhere, None)),
            wire.request("prepared", codec.encode([elsewhere.body, epoch, [[liar.id, bytes(64)]]])),
            wire.request("grant", b"\x90"),
        ):
            count = len(victim.port.blamed)
            await send(liar, victim, payload)
            assert len(victim.port.blamed) == count + 1, payload[:40]
        stranger = await world.start(key("stranger"))
        stranger.elector = nodes[0].elector
        count = len(victim.port.blamed)
        assert "only electors" in str(await send(stranger, victim, wire.request("status", None)))
        assert len(victim.port.blamed) == count
        assert elector_of(victim).voter.state.epoch < state.epoch + 40


async def test_nobody_is_blamed_by_one_that_may_not_know_the_electors_in_force(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with electors() as (_, nodes):
        await progress(nodes, 1)
        ahead, behind = nodes[0], nodes[1]
        voter, height = elector_of(behind).voter, len(behind.service.replica.cuts)
        # By an amendment that the one behind does not hold, it is this elector's epoch, and others than it knows vote.
        epoch = voter.state.epoch + 5 - (voter.state.epoch - DOMAIN.electors.index(ahead.id)) % 4
        later = Cut.make(DOMAIN.id, height + 2, digest("prev"), digest("root"), [row("x")])
        prepared = PreparedCut(later, epoch, (vote(key("e9"), later, epoch),))
        for op, payload in (
            ("report", wire.request("report", [epoch, height + 1])),
            ("propose", wire.request("propose", wire.proposal(epoch, later, None))),
            ("prepared", wire.request("prepared", prepared.encode())),
        ):
            answer = wire.parse_answer(op, await behind.port.handlers[voter.protocol](ahead.id, payload))
            assert isinstance(answer, wire.Refusal)
            assert answer.reason == f"it holds {answer.height} cuts"


async def test_messages_read_as_written() -> None:
    evidence = wire.SignedBallot(1, 7, digest("cut"), bytes(64))
    for shown in (None, evidence):
        reached = wire.Reached(1, 2, 3, shown)
        assert wire.parse_status(wire.status(reached)) == reached
    refusal = wire.Refusal("because ø" + "x" * 200, 1, 2, 3)
    read = wire.parse_answer("propose", wire.answer(refusal))
    assert read == wire.Refusal(("because ?" + "x" * 200)[: wire.MAX_REASON], 1, 2, 3)
    assert wire.parse_answer("certified", wire.answer(None)) is None
    for op, data in (("propose", wire.answer(None)), ("propose", wire.answer(b"short")), ("report", b"")):
        with pytest.raises(PeerError):
            wire.parse_answer(op, data)


async def test_a_damaged_state_is_one_line_with_a_remedy(autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (_, nodes):
        await progress(nodes, 1)
        nodes[0].disk.values[META] = nodes[0].disk.values[META][:-1]
        with pytest.raises(UserError, match=r"damaged.*; delete the folder log"):
            await open_elector(nodes[0].service, nodes[0].identity, nodes[0].sync)


async def test_leaving_nothing_to_cut(autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (_, nodes):
        await nodes[0].service.append(Leave())
        await progress(nodes[1:], 1)
        assert await elector_of(nodes[0]).cut() is None


async def test_an_amendment_changes_who_elects(autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (world, nodes):
        newcomer = await world.start(key("e5"))
        everybody = [*nodes, newcomer]
        await progress(everybody, 1)
        amendment = Amendment.make(DOMAIN.id, 1, [node.id for node in (*nodes[:3], newcomer)], DOMAIN.thresholds)
        signed = {node.id: await elector_of(node).voter.sign_amendment(amendment) for node in nodes[1:]}
        votes = {node: signature for node, signature in signed.items() if isinstance(signature, bytes)}
        assert len(votes) == 3
        other = Amendment.make(DOMAIN.id, 1, [newcomer.id], DOMAIN.thresholds)
        assert "another amendment" in str(await elector_of(nodes[1]).voter.sign_amendment(other))
        await newcomer.service.append(amendment.payload(votes))
        await progress(everybody, 1)
        assert newcomer.service.replica.amendments.number == 1
        newcomer.elector = await open_elector(newcomer.service, newcomer.identity, newcomer.sync)
        world.nursery.start_soon(newcomer.elector.run)
        await progress(everybody, 3, within=30 * PACE)
        gone = nodes.pop(0)
        world.crash(gone)
        await progress([*nodes, newcomer], 3, within=60 * PACE)
        await converge([*nodes, newcomer])
        agree([*nodes, newcomer])
        last = newcomer.service.replica.cuts[-1]
        assert {elector for elector, _ in last.votes} == {nodes[0].id, nodes[1].id, newcomer.id}
        assert elector_of(nodes[2]).voter.away() == "it is no elector any more"


async def test_a_disk_that_refuses_ends_no_elector(autojump_clock: trio.testing.MockClock) -> None:
    async with electors() as (_, nodes):
        await progress(nodes, 1)
        for node in nodes:
            node.disk.full = True
        with pytest.raises(OSError, match="no space"):
            await write(nodes[0])
        await trio.sleep(10 * PACE)
        for node in nodes:
            node.disk.full = False
        await progress(nodes, 2, within=60 * PACE)
        agree(nodes)
