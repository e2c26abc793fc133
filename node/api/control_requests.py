"""What can be asked for over the control socket: one JSON object a line, its operation under ``op``.

The operations are ``node.api.control_socket``'s, ``status``'s, ``weight_requests``',
``amend_requests``', ``invite_requests``' and
``recovery_requests``'. Bytes are hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from node.api.pulls import Pulls
from node.errors import Refused
from node.roles.term_watch import ElectorPart
from node.roles.workbench import Workbench
from node.weights.bulk.bulk_process import BulkProcess

Answer = dict[str, Any]


class Panel(Workbench, Protocol):
    """What of a running node can be asked for and told; ``stop`` ends the daemon."""

    bulk: BulkProcess
    pulls: Pulls
    elector: ElectorPart
    stop: Callable[[], None]


class Request(msgspec.Struct, tag_field="op"):
    """One request. What ``answer`` raises is told in the answer."""

    async def answer(self, panel: Panel) -> Answer:
        """What a running node answers to it."""
        raise NotImplementedError


def octets(text: str, what: str) -> bytes:
    """The bytes that hexadecimal digits stand for. Raises ``Refused``."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise Refused(f"{what} is not hexadecimal") from None
