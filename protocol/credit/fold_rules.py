"""What a fold (``protocol.credit.fold``) asks of whoever runs it, and what it tells of each cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.credit.submission_life import Decision
from protocol.domain import Domain, Thresholds
from protocol.log.entry import Entry
from protocol.log.quorum import CertifiedGrant
from protocol.records import Rollout


class Rules(Protocol):
    """What a fold asks the ledger."""

    @property
    def domain(self) -> Domain:
        """The domain whose log this is."""

    @property
    def grants(self) -> Mapping[int, CertifiedGrant]:
        """The grants, by term."""

    def height(self, cut_id: bytes) -> int | None:
        """The height of a cut."""

    def eligible(self, author: bytes, height: int) -> bool:
        """Whether the author's join is covered by the cut of this height."""

    def audience(self, height: int) -> frozenset[bytes]:
        """The validators of versions that anchor on the cut of this height."""

    def drawn(self, verdict: Entry, rollout: Rollout) -> bool:
        """Whether the verdict's draw is its author's signature over the submission."""

    def share(self, author: bytes, height: int) -> int:
        """The share (micro) of the author's submissions that is replayed where the version anchors on this cut."""

    def thresholds(self, height: int) -> Thresholds:
        """The limits in force at the cut of this height."""


@dataclass(frozen=True, slots=True)
class Closed:
    """What a cut decided: the decisions that fell for good, by rollout id; the submissions that it closed, each with
    the verdicts that count, and those of them that were never taken up; and (rollout id, verdict id) of verdicts whose
    submission did not come in time."""

    decided: Mapping[bytes, Decision]
    unread: Sequence[bytes]
    submissions: Mapping[bytes, frozenset[bytes]]
    verdicts: Sequence[tuple[bytes, bytes]]
