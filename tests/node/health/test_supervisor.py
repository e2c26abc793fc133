"""How a service that fails is begun again, and what is said of it meanwhile."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from itertools import pairwise

import pytest
import trio
import trio.testing

from node.errors import UserError, innermost
from node.health import supervisor
from node.health.supervisor import Failure, RestartPolicy
from node.health.warnings import Health
from protocol.errors import LocalError, PeerError

logger = logging.getLogger("test.supervisor")
NAME = "feeding the cat"
POLICY = RestartPolicy(pause=1.0, longest=8.0, steady=30.0)


class Service:
    """Fails as it is told, run by run, each after so many seconds; then it runs for ever. None: that run ends well."""

    def __init__(self, *failures: Exception | None, after: Sequence[float] = ()) -> None:
        self.failures = list(failures)
        self.after = list(after)
        self.begun: list[float] = []
        self.running = False

    async def run(self) -> None:
        self.begun.append(trio.current_time())
        self.running = True
        try:
            if not self.failures:
                await trio.sleep_forever()
            await trio.sleep(self.after.pop(0) if self.after else 0)
            error = self.failures.pop(0)
            if error is not None:
                raise error
        finally:
            self.running = False

    @property
    def pauses(self) -> list[float]:
        return [round(b - a, 3) for a, b in pairwise(self.begun)]


def start(nursery: trio.Nursery, service: Service) -> Health:
    health = Health(logger)

    async def keep() -> None:
        await supervisor.keep(NAME, service.run, health, policy=POLICY)

    nursery.start_soon(keep)
    return health


async def test_what_fails_again_and_again_is_begun_later_and_later(autojump_clock: trio.testing.MockClock) -> None:
    service = Service(*(OSError(28, "No space left on device") for _ in range(6)))
    async with trio.open_nursery() as nursery:
        health = start(nursery, service)
        await trio.sleep(0.5)
        assert health.warnings == {NAME: f"{NAME} stopped: [Errno 28] No space left on device; it starts again in 1 s"}
        await trio.sleep(60)
        assert service.pauses == [1, 2, 4, 8, 8, 8]
        assert service.running
        nursery.cancel_scope.cancel()


async def test_the_warning_stands_until_the_service_was_well_for_long_enough(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service = Service(*(LocalError(f"number {number}") for number in range(4)), after=[0, 29, 29, 29])
    async with trio.open_nursery() as nursery:
        health = start(nursery, service)
        for _ in range(100):  # in between it is never called well, however long it ran
            await trio.sleep(1)
            if service.failures:
                assert NAME in health.warnings
                assert not any("in order again" in message for message in caplog.messages)
        assert "number 3" in health.warnings[NAME]
        await trio.sleep(POLICY.longest)
        began = service.begun[-1]
        await trio.sleep_until(began + POLICY.steady - 0.5)
        assert NAME in health.warnings
        await trio.sleep(1)
        assert health.warnings == {}
        assert caplog.messages[-1] == f"{NAME}: in order again"
        assert caplog.messages.count(f"{NAME}: in order again") == 1
        nursery.cancel_scope.cancel()


async def test_what_was_well_for_long_enough_has_the_shortest_pause_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    failures = [OSError("a"), OSError("b"), OSError("c"), OSError("d")]
    service = Service(*failures, after=[0, 0, POLICY.steady + 1, 0])
    async with trio.open_nursery() as nursery:
        health = start(nursery, service)
        await trio.sleep(3.5 + POLICY.steady)
        assert health.warnings == {}  # well meanwhile
        await trio.sleep(60)
        assert service.pauses == [1, 2, POLICY.steady + 1 + 1, 2]
        nursery.cancel_scope.cancel()


async def test_what_its_owner_must_mend_waits_the_longest_pause_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    service = Service(UserError("no sandbox", "install bubblewrap"))
    async with trio.open_nursery() as nursery:
        health = start(nursery, service)
        await trio.sleep(1)
        assert health.warnings[NAME] == f"{NAME} stopped: no sandbox; install bubblewrap; it starts again in 8 s"
        await trio.sleep(10)
        assert service.pauses == [POLICY.longest]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "is_bug"),
    [
        (OSError(5, "Input/output error"), False),
        (LocalError("x"), False),
        (PeerError("x"), False),
        (trio.TooSlowError(), False),
        (ExceptionGroup("a nursery", [ExceptionGroup("another", [OSError("x")])]), False),
        (RuntimeError("x"), True),
        (KeyError("x"), True),
        (sqlite3.OperationalError("disk I/O error"), True),
        (ExceptionGroup("a nursery", [AssertionError("x")]), True),
    ],
)
async def test_a_bug_is_logged_once_with_its_traceback_and_a_mistake_of_the_outside_is_not(
    error: Exception, is_bug: bool, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(error)
    async with trio.open_nursery() as nursery:
        health = start(nursery, service)
        await trio.sleep(5)
        assert service.running
        assert health.warnings[NAME].startswith(f"{NAME} stopped: ")
        records = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(records) == is_bug
        for record in records:
            assert record.getMessage() == f"{NAME}: a bug"
            assert record.exc_info is not None
            assert record.exc_info[1] is innermost(error)
        nursery.cancel_scope.cancel()


async def test_an_error_without_words_is_told_by_its_name(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        health = start(nursery, Service(trio.TooSlowError()))
        await trio.sleep(0.1)
        assert health.warnings[NAME] == f"{NAME} stopped: TooSlowError; it starts again in 1 s"
        nursery.cancel_scope.cancel()


async def test_one_that_ends_is_begun_again_without_a_word(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service = Service(None, None)
    async with trio.open_nursery() as nursery:
        health = start(nursery, service)
        await trio.sleep(10)
        assert service.pauses == [1, 2]
        assert service.running
        assert (health.warnings, caplog.messages) == ({}, [])
        nursery.cancel_scope.cancel()


async def test_it_is_given_up_where_its_owner_says_so(autojump_clock: trio.testing.MockClock) -> None:
    service, health, told = Service(*(OSError("x") for _ in range(9))), Health(logger), list[Failure]()

    def give_up(failure: Failure) -> bool:
        told.append(failure)
        return failure.times == 3

    with trio.fail_after(60):
        await supervisor.keep(
            NAME, service.run, health, policy=POLICY, words=lambda f: f"{f.times} times", give_up=give_up
        )
    assert [failure.times for failure in told] == [1, 2, 3]
    assert service.pauses == [1, 2]
    assert health.warnings == {}


async def test_the_words_are_its_owners(autojump_clock: trio.testing.MockClock) -> None:
    service, health = Service(OSError("x")), Health(logger)
    with trio.move_on_after(0.5):
        await supervisor.keep(NAME, service.run, health, words=lambda failure: f"{failure.error} it is")
    assert health.warnings == {NAME: "x it is"}


async def test_its_end_is_its_owners_to_say(autojump_clock: trio.testing.MockClock) -> None:
    service = Service()
    with trio.move_on_after(1) as scope:
        await supervisor.keep(NAME, service.run, Health(logger), policy=POLICY)
    assert scope.cancelled_caught
    assert not service.running
    assert len(service.begun) == 1
