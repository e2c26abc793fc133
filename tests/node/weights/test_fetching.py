"""Whom the child is told of, and what it may ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from node.errors import Busy, Unreachable
from node.net import chunks
from node.weights import fetching
from node.weights.bulk.token_exchange import Route
from node.weights.fetching import MOST, REDRAW_IDLE, Carrier, _Job
from protocol.weights.holders import Holding
from protocol.weights.manifest import Manifest

MANIFEST = Manifest.of_file([("weights", "F32", (4,))], bytes(16), 1)
FAKES = [b"\0" + bytes([n]) * 31 for n in range(60)]
HONEST, AUTHOR = b"\xfe" * 32, b"\xff" * 32


class Bulk:
    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.up, self.starts = False, 0

    def hear(self, op: str, handler: Any) -> None:
        del op, handler

    def on_change(self, callback: Any) -> None:
        del callback

    def tell(self, op: str, **values: Any) -> bool:
        self.told.append((op, values))
        return True


@asynccontextmanager
async def job_of() -> AsyncIterator[tuple[Carrier, _Job, Bulk]]:
    bulk = Bulk()
    made = Carrier(SimpleNamespace(bulk=bulk, network=None))  # type: ignore[arg-type]
    job = _Job(MANIFEST, fetching.Progress(0, 1), trio.current_time())
    made._jobs[MANIFEST.digest] = job
    for node in (*FAKES, HONEST, AUTHOR):
        job.routes[node] = Route("/ip4/192.0.2.1/tcp/1/http", "t", 1e9)
        job.ask_at[node] = 1e9
    async with trio.open_nursery() as nursery:
        job.nursery = nursery
        yield made, job, bulk
        nursery.cancel_scope.cancel()


async def test_liars_under_many_names_crowd_nobody_out(autojump_clock: trio.testing.MockClock) -> None:
    async with job_of() as (made, job, bulk):
        holders = {node: Holding() for node in FAKES} | {HONEST: Holding(whole=False), AUTHOR: Holding(spared=True)}
        seen = set()
        for _ in range(200):
            made._tell_holders(job, holders)
            told = {row[0] for row in job.rows}
            assert len(told) == MOST
            assert AUTHOR in told
            seen |= told
            made._tell_holders(job, holders)
            assert {row[0] for row in job.rows} == told  # nothing changes in between
            if HONEST in seen:
                break
            await trio.sleep(REDRAW_IDLE + 0.1)
        assert HONEST in seen
        assert bulk.told


async def test_what_the_child_cannot_begin_fails_in_time(autojump_clock: trio.testing.MockClock) -> None:
    async with job_of() as (made, job, bulk):
        bulk.up, bulk.starts = True, 1
        async with trio.open_nursery() as nursery:

            async def bring() -> None:
                with pytest.raises(Unreachable, match=r"1 chunks of .* are missing: it was not begun"):
                    await made._by_child(job, dict, 20.0)

            nursery.start_soon(bring)
            await trio.sleep(1)
            made._failed(MANIFEST.digest, "it was not begun")
        assert [op for op, _ in bulk.told] == ["fetch", "stop"]


async def test_a_slow_holder_is_asked_what_it_has_once_at_a_time(
    autojump_clock: trio.testing.MockClock, monkeypatch: Any
) -> None:
    asked: list[bytes] = []

    async def ask_have(network: Any, peer: bytes, listing: Any) -> bytes:
        asked.append(peer)
        await trio.sleep(30)
        return b"\x80"

    monkeypatch.setattr(chunks, "ask_have", ask_have)
    async with job_of() as (made, job, bulk):
        for _ in range(50):
            for node in FAKES[:20]:
                made._fallback(MANIFEST.digest, node, -1)
            await trio.sleep(0.5)
        assert sorted(asked) == FAKES[:20]
        assert job.nursery is not None
        assert len(job.nursery.child_tasks) == 20
        await trio.sleep(31)
        assert [op for op, _ in bulk.told].count("haves") == 20
        made._fallback(MANIFEST.digest, FAKES[0], -1)
        await trio.sleep(1)
        assert len(asked) == 21


async def test_a_slow_peer_keeps_nobody_elses_chunks_away(
    autojump_clock: trio.testing.MockClock, monkeypatch: Any
) -> None:
    slow, quick = FAKES[0], FAKES[1]
    asked: list[bytes] = []

    async def ask_chunk(network: Any, peer: bytes, digest: bytes, index: int) -> bytes:
        asked.append(peer)
        await trio.sleep(30 if peer == slow else 1)
        raise Busy("busy")

    monkeypatch.setattr(chunks, "ask_chunk", ask_chunk)
    async with job_of() as (made, _, bulk):
        for _ in range(20):
            made._fallback(MANIFEST.digest, slow, 0)
        for _ in range(4):
            made._fallback(MANIFEST.digest, quick, 0)
        await trio.sleep(3)
        told = [(values["node"], values["outcome"]) for op, values in bulk.told if op == "delivered"]
        assert told == [(quick, "busy")] * 4
        assert asked.count(slow) == 2
        await trio.sleep(400)
        assert asked.count(slow) == 20
        assert made._relayed == {}
