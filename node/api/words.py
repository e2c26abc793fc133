"""Reason codes in words."""

from __future__ import annotations

from proofs.checks import REASONS


def words(reason: str) -> str:
    """A reason code in words; a code of a later version as it is."""
    return REASONS[reason].words if reason in REASONS else reason
