"""How the daemon's process ends: at a signal or its owner's wish, in time, in the midst of anything."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final

import trio

STOP_SECONDS: Final = 1.2
"""From the wish to stop to the end of the process. A thread that hashes or syncs a version cannot be broken off, nor
can SQLite, and libp2p and children that are killed have seconds each; none of them need end its work: files and log are
sound at any moment, as for a power cut, and the children end with the daemon."""


async def stop_on_signal(stop: Callable[[], None], on_stop: Callable[[], None]) -> None:
    """The time to end counts from the signal, also where the loop is busy with something long."""
    token = trio.lowlevel.current_trio_token()

    def handle(number: int, frame: object) -> None:
        on_stop()
        token.run_sync_soon(stop)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        await trio.sleep_forever()
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def ending() -> Callable[[], None]:
    """What has this process end ``STOP_SECONDS`` after it is first called, whatever its threads do then. A signal's
    handler may call it: it starts no thread and takes no lock."""
    reader, writer = os.pipe()

    def end() -> None:
        os.read(reader, 1)
        time.sleep(STOP_SECONDS)
        os._exit(0)

    def begin() -> None:
        os.write(writer, b"\0")

    threading.Thread(target=end, daemon=True, name="end-in-time").start()
    return begin
