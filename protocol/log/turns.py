"""Whose turn it is to propose: one elector after the other, so that a faulty one delays and cannot stop the rest.

Times are seconds of the elector's own monotonic clock; nothing here is stored or agreed on.

1. After the cut of epoch e the turn is elector ``e + 1 mod n``'s. It proposes once ``pace`` seconds have passed since
   that cut and it holds something that no cut covers.
2. While nothing is heard from it, the next elector takes over after ``patience`` seconds, and so on around. Whoever is
   heard proposing, when its turn has come by the listener's clock, has the turn from then on.
3. Others are not listened to: so whoever proposes out of turn, however often and with however high epochs, breaks off
   nobody's attempt, and after its own turn all others come first.
4. Epochs are not above the last cut's by more than ``JUMP`` for each ``pace`` since: nobody uses them up, and an
   elector that was talked into a high one is not out of the others' reach for long.
5. Each turn that ends without a cut doubles the patience, up to ``MAX_BACKOFF`` times: links may be slow.
"""

from __future__ import annotations

from typing import Final

MAX_BACKOFF: Final = 8
JUMP: Final = 2**20


def reach(last: int, elapsed: float, pace: float) -> int:
    """How high a counter may go ``elapsed`` seconds after it was at ``last``."""
    return last + JUMP * (1 + int(elapsed / pace))


class Turns:
    """The turns as elector ``me`` of ``electors`` sees them, both numbers of places in their list."""

    def __init__(self, electors: int, me: int, pace: float, now: float, epoch: int = 0) -> None:
        self._electors = electors
        self._me = me
        self._pace = pace
        self.cut(epoch, now)

    def cut(self, epoch: int, now: float) -> None:
        """A cut of ``epoch`` was certified."""
        self.holder = (epoch + 1) % self._electors
        self._epoch, self._began = epoch, now
        self._since = now
        self._changes = 0
        self._taken = False

    def limit(self, now: float) -> int:
        """The highest epoch that may be voted in now."""
        return reach(self._epoch, now - self._began, self._pace)

    @property
    def patience(self) -> float:
        """Seconds that whoever has the turn is given before the next one may take over."""
        return float(self._pace * min(2**self._changes, MAX_BACKOFF))

    def accepts(self, elector: int, now: float) -> bool:
        """Whether ``elector`` may propose now."""
        return now >= self._since + self._rank(elector) * self.patience

    def take(self, elector: int, now: float) -> bool:
        """Note that ``elector`` proposes; whether it may."""
        if not self.accepts(elector, now):
            return False
        if elector != self.holder:
            self._changes += self._taken or self._rank(elector) > 0
            self.holder, self._since = elector, now
        elif not self._taken:
            self._since = now
        self._taken = True
        return True

    def due(self, uncovered: float) -> float:
        """When this elector should propose; ``uncovered`` is since when it holds something that no cut covers."""
        rank = self._rank(self._me)
        if not self._taken:
            return max(self._since + self._pace, uncovered) + rank * self.patience
        # A little later than the others would accept it, for their clocks began a moment later.
        return self._since + rank * self.patience + self._pace / 4

    def _rank(self, elector: int) -> int:
        return (elector - self.holder) % self._electors
