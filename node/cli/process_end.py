"""Ending a process that is done, without taking it apart."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process now, once what it said is written.

    Taking an interpreter with the network stack apart costs ten times the processor time that stopping the daemon
    does, and waits for threads whose work is wanted no more. Raises ``BrokenPipeError`` where nobody reads.
    """
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)
