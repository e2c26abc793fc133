"""Draws of verdicts: a verdict counts only if its draw is its author's signature over the submission
(``protocol.work.schedule``, rule 3). Checking one takes 0.1 ms, so what was found is kept."""

from __future__ import annotations

from itertools import islice
from typing import Final

from protocol import identity
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.records import Rollout, Verdict
from protocol.work.schedule import draw_message

MAX_DRAWN: Final = 65_536
"""Verdicts whose draws are remembered, the newest."""


class Draws:
    """Whether draws are right, by the verdict entries' ids."""

    def __init__(self) -> None:
        self._known: dict[bytes, bool] = {}

    def __contains__(self, verdict_id: object) -> bool:
        """Whether the draw of this verdict was checked."""
        return verdict_id in self._known

    def note(self, verdict_id: bytes, right: bool) -> None:
        """Take notice of a draw that was checked elsewhere."""
        if len(self._known) >= MAX_DRAWN:
            for old in list(islice(self._known, MAX_DRAWN // 2)):
                del self._known[old]
        self._known[verdict_id] = right

    def right(self, verdict: Entry, rollout: Rollout) -> bool:
        """Whether a verdict's draw is its author's signature over the submission."""
        found = self._known.get(verdict.id)
        if found is None:
            found = check_draw(verdict, rollout)
            self.note(verdict.id, found)
        return found


def check_draw(verdict: Entry, rollout: Rollout) -> bool:
    """The same, without looking at what is known."""
    assert isinstance(verdict.payload, Verdict)
    message = draw_message(rollout.submission, verdict.payload.rollout)
    try:
        identity.verify(verdict.author, identity.DRAW, message, verdict.payload.draw, "draw")
    except PeerError:
        return False
    return True
