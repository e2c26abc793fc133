"""How far a peer is trusted as a counterpart: mistakes counted, forgotten with time, punished by a ban.

Pure: the time (seconds of any monotonic clock) is an argument. A score here is local opinion about a connection's
other end; reputation in the log is something else (``protocol.credit.reputation``).

1. Every mistake adds points; points halve every ``half_life`` seconds, so an honest peer recovers.
2. At ``ban_score`` points the peer is banned for ``ban_seconds``, doubled with each further ban up to ``max_ban``.
3. Each (peer, reason) is logged once, and of all peers together a few a second (``node.net.sparing_log``); after
   ``MAX_REASONS`` different reasons a peer's others count as "other".
4. At most ``MAX_PEERS`` peers are remembered; the one longest without a mistake goes first.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final

from node.net.sparing_log import SparingLog
from protocol.errors import Error

log = logging.getLogger(__name__)

POINTS: Final = 10.0
"""For each mistake."""

MAX_REASONS: Final = 16
MAX_PEERS: Final = 4096
MAX_REASON_CHARACTERS: Final = 120


@dataclass(slots=True)
class _Record:
    points: float = 0.0
    updated: float = 0.0
    banned_until: float = 0.0
    bans: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class Scores:
    """The scores of all peers that ever made a mistake. By default ten in a row ban."""

    def __init__(
        self, *, ban_score: float = 95, half_life: float = 300, ban_seconds: float = 60, max_ban: float = 86400
    ) -> None:
        self._ban_score = ban_score
        self._half_life = half_life
        self._ban_seconds = ban_seconds
        self._max_ban = max_ban
        self._records: OrderedDict[bytes, _Record] = OrderedDict()
        self._log = SparingLog(log)

    def __len__(self) -> int:
        return len(self._records)

    def blame(self, peer: bytes, error: Error | str, now: float, share: float = 1.0) -> bool:
        """Count a mistake of ``peer`` (32-byte node id), or a share of one; True if it is banned from now on."""
        record = self._records.pop(peer, None) or _Record(updated=now)
        self._records[peer] = record
        if len(self._records) > MAX_PEERS:
            self._records.popitem(last=False)
        decay = 0.5 ** (max(0.0, now - record.updated) / self._half_life)
        record.points = record.points * decay + POINTS * share
        record.updated = now
        reason = str(error)[:MAX_REASON_CHARACTERS]
        if reason not in record.reasons and len(record.reasons) >= MAX_REASONS:
            reason = "other"
        record.reasons[reason] += 1
        if record.reasons[reason] == 1:
            self._log.warning(now, "peer %s: %s", peer.hex()[:8], reason)
        if record.points < self._ban_score or record.banned_until > now:
            return False
        seconds = min(self._ban_seconds * 2**record.bans, self._max_ban)
        record.bans = min(record.bans + 1, 32)
        record.banned_until = now + seconds
        record.points = self._ban_score / 2  # the next ban needs half as many mistakes
        self._log.warning(now, "peer %s: banned for %d s", peer.hex()[:8], seconds)
        return True

    def banned(self, peer: bytes, now: float) -> bool:
        """Whether the peer is to be refused at ``now``."""
        record = self._records.get(peer)
        return record is not None and record.banned_until > now

    def reasons(self, peer: bytes) -> dict[str, int]:
        """How often the peer was blamed, by reason."""
        record = self._records.get(peer)
        return {} if record is None else dict(record.reasons)
