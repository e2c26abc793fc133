"""Reason codes in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from proofs.checks import REASONS

_WEIGHTS: Final = "check that nothing on this machine changes what is computed, and run farflung doctor"
REMEDIES: Final[Mapping[str, str]] = {
    "malformed": "update farflung: this version writes files that others refuse",
    "wrong-header": "update farflung: this version writes files that others refuse",
    "bounds": "update farflung: this version writes files that others refuse",
    "wrong-prompt": "update farflung, and compare the packages of the tasks with the genesis: farflung domain show",
    "termination": "update farflung: this version writes files that others refuse",
    "sampling": _WEIGHTS,
    "logprobs": _WEIGHTS,
    "activations": _WEIGHTS,
    "borderline": f"this earns nothing and, if it goes on, costs reputation: {_WEIGHTS}",
    "drift": _WEIGHTS,
    "copied": "responses must be generated here",
    "reward": "compare the packages of the tasks with the genesis: farflung domain show",
    "understated": "the machine may be too busy to score in time: lower its load",
    "undecidable": "nothing: nobody could decide, and nobody is blamed",
    "missing": "others could not fetch its files in time: see farflung peers, and check reachability and bandwidth",
    "late": "the machine or its link is slow: its work came when newer versions were in use",
    "gap": "nothing, if it was restarted or moved: counting begins anew with the next version",
    "ineligible": "nothing: it earns from the next version on",
    "duplicate": "run one node with this key, not two",
    "unjudged": "nothing: the validators were away",
}
"""What a node's operator may do about each reason."""


def remedy(reason: str) -> str:
    """What to do about a reason code; empty for a code of a later version."""
    return REMEDIES.get(reason, "")


def words(reason: str) -> str:
    """A reason code in words; a code of a later version as it is."""
    return REASONS[reason].words if reason in REASONS else reason
