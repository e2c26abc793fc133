"""How every service of a daemon is run: begun again whenever it fails or ends, so that none of them ends the daemon.

1. Nothing that a service raises leaves ``keep`` but its cancellation. A mistake of the outside (``Error``, ``OSError``,
   a deadline) is a health warning with its cause; anything else is a bug of ours, logged with its traceback as well.
2. It is begun again after a pause that doubles up to the policy's longest, and is that at once for what its owner must
   mend; the first is the shortest again once it has been well for ``steady`` seconds.
3. The warning stands until then: what fails again and again is never called in order in between.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from node.errors import UserError, innermost
from node.health.warnings import Health
from protocol.errors import Error

Service = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Seconds: the first pause, the longest, and after how many a service counts as well again."""

    pause: float = 1.0
    longest: float = 60.0
    steady: float = 30.0


POLICY: Final = RestartPolicy()


@dataclass(slots=True)
class Failure:
    """What a service failed of: how often in a row, and when it is begun again (in seconds)."""

    name: str
    error: BaseException
    times: int
    pause: float

    @property
    def why(self) -> str:
        """The error in words."""
        return str(self.error) or type(self.error).__name__

    def __str__(self) -> str:
        return f"{self.name} stopped: {self.why}; it starts again in {self.pause:.0f} s"


async def keep(
    name: str,
    service: Service,
    health: Health,
    *,
    policy: RestartPolicy = POLICY,
    words: Callable[[Failure], str] = str,
    give_up: Callable[[Failure], bool] = lambda failure: False,
) -> None:
    """Run ``service`` for ever under the name that its warning has. ``words`` tells of a failure; where ``give_up``
    says so the service is left, and this returns."""
    pause, failures = policy.pause, 0
    while True:
        began = trio.current_time()
        error: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_clear_once_steady, name, health, policy.steady)
                await service()
                nursery.cancel_scope.cancel()
        except* Exception as group:
            error = innermost(group)
        if trio.current_time() - began >= policy.steady:
            pause, failures = policy.pause, 0
        if error is None:
            health.clear(name)  # it came to its own end
        else:
            failures += 1
            if isinstance(error, UserError):
                pause = policy.longest  # its owner has to do something
            failure = Failure(name, error, failures, pause)
            if not isinstance(error, Error | OSError | trio.TooSlowError):
                health.log.error("%s: a bug", name, exc_info=error)
            if give_up(failure):
                health.clear(name)
                return
            health.warn(name, words(failure))
        await trio.sleep(pause)
        pause = min(2 * pause, policy.longest)


async def _clear_once_steady(name: str, health: Health, steady: float) -> None:
    await trio.sleep(steady)
    health.clear(name)
