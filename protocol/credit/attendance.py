"""Who leaves due verdicts to others: a validator that answers nothing does not keep its office by being heard.

1. When a submission is closed, each of its due validators has given its verdict or missed it. A miss counts where there
   were others due and all of them gave theirs.
2. ``MISSED_VERDICTS`` misses in a row end the standing. What was due before it stood as a validator again counts for
   nothing.
3. A ``role`` entry brings it back that anchors ``RETURN_CUTS`` cuts later or more; each repeat doubles that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from protocol import codec
from protocol.codec import Array, Int, Many
from protocol.constants import MISSED_VERDICTS

RETURN_CUTS: Final = 8
MAX_DOUBLINGS: Final = 20

SCHEMA: Final = Many(Array((("validator", codec.KEY), ("missed", Int()), ("repeats", Int()))), most=codec.MAX_INT)
"""What ``Attendance.to_value`` gives."""


@dataclass(frozen=True, slots=True)
class Attended:
    """A submission that was closed: who was ``due``, who of them ``voted``, and the height of its version's anchor."""

    due: Sequence[bytes]
    voted: Collection[bytes]
    anchor: int


class Attendance:
    """Misses in a row, and how often they ended a standing, by validator."""

    def __init__(self) -> None:
        self._missed: Counter[bytes] = Counter()
        self._repeats: Counter[bytes] = Counter()

    def note(self, closed: Attended, validator: bytes, since: int) -> bool:
        """Take notice of what a due validator, standing ``since`` that cut, did; whether its standing ends."""
        if validator in closed.voted:
            self._missed.pop(validator, None)
            return False
        others = [other for other in closed.due if other != validator]
        if closed.anchor < since or not others or any(other not in closed.voted for other in others):
            return False
        self._missed[validator] += 1
        if self._missed[validator] < MISSED_VERDICTS:
            return False
        del self._missed[validator]
        self._repeats[validator] += 1
        return True

    def returns(self, validator: bytes) -> int:
        """Cuts before a return counts."""
        return int(RETURN_CUTS << min(max(self._repeats[validator] - 1, 0), MAX_DOUBLINGS))

    def to_value(self) -> list[Any]:
        """All of it, for a snapshot."""
        validators = sorted(self._missed.keys() | self._repeats.keys())
        return [[validator, self._missed[validator], self._repeats[validator]] for validator in validators]

    @classmethod
    def from_value(cls, value: Any) -> Attendance:
        """The inverse, for a value that fits ``SCHEMA``."""
        self = cls()
        for validator, missed, repeats in value:
            if missed:
                self._missed[validator] = missed
            if repeats:
                self._repeats[validator] = repeats
        return self
