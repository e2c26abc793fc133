"""What can be asked for over the control socket: one JSON object a line, its operation under ``op``.

The meaning of each is told where it is answered: ``node.api.status``, ``weight_requests``, ``amend_requests`` and
``recovery_requests``. Bytes are hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from node.api.pulls import Pulls
from node.context import Node
from node.errors import Refused
from node.peers.own_state import OwnState
from node.peers.presences import Presences
from node.roles.elector_part import ElectorPart
from node.roles.rollout_pool import Pool
from node.roles.workbench import Evaluations
from node.store.version_store import VersionStore
from node.weights.bulk.bulk_process import BulkProcess
from node.weights.following import WeightsService


class Request(msgspec.Struct, tag_field="op"):
    """One request."""


class Status(Request, tag="status"):
    """What the node does."""


class Peers(Request, tag="peers"):
    """Who is there."""


class Roles(Request, tag="roles"):
    """Who holds which role."""


class Credits(Request, tag="credits"):
    """What everybody earned."""


class LeaveDomain(Request, tag="leave"):
    """End the node's part in its domain; a status tells when it has left."""


class PauseAt(Request, tag="pause_at"):
    """End work at this step; 0: go on."""

    step: Annotated[int, msgspec.Meta(ge=0)]


class Stop(Request, tag="stop"):
    """End the daemon."""


class ListWeights(Request, tag="weights"):
    """What is on the disk and why."""


class CleanWeights(Request, tag="weights-gc"):
    """Delete what nothing keeps."""

    dry_run: bool


class PullWeights(Request, tag="weights-pull"):
    """Begin to fetch a version, or tell how far it is."""

    version: int | str


class ShowAmendments(Request, tag="amend"):
    """What is in force."""


class SignAmendment(Request, tag="amend_sign"):
    """Have the node's elector sign."""

    body: str


class SubmitAmendment(Request, tag="amend_submit"):
    """Append an amendment with its signatures by elector."""

    body: str
    votes: dict[str, str]


class ShowRecovery(Request, tag="recovery"):
    """The nodes that committed to a recovery key."""

    commitment: str


class Ending(Request):
    """A statement of a recovery key on a feed."""

    target: str
    recovery: str
    signature: str


class CloseFeed(Ending, tag="close"):
    """End a feed."""


class RebindFeed(Ending, tag="rebind"):
    """Let its account go on under this node's key."""


@dataclass(frozen=True, slots=True)
class Panel:
    """What of a running node can be asked for and told; ``stop`` ends the daemon."""

    node: Node
    own: OwnState
    presences: Presences
    versions: VersionStore
    weights: WeightsService
    bulk: BulkProcess
    pool: Pool
    pulls: Pulls
    elector: ElectorPart
    evaluations: Evaluations
    stop: Callable[[], None]


Answer = dict[str, Any]
Handler = Callable[[Panel, Any], Awaitable[Answer]]
"""Answers one kind of request. What it raises is told in the answer."""


def octets(text: str, what: str) -> bytes:
    """The bytes that hexadecimal digits stand for. Raises ``Refused``."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise Refused(f"{what} is not hexadecimal") from None
