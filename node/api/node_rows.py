"""Rows of a domain's nodes that a ledger alone gives: the same from a running daemon and from a log on disk."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from protocol.credit.ledger import Ledger
from protocol.credit.reputation import Account
from protocol.records import Step

AS_IT_IS: Final = (
    *("lag_max", "accepted", "rejected", "trained", "tokens"),
    *("train_ms", "wait_ms", "publish_ms", "blocked_ms"),
)
"""What a row says of a step in the entry's own words."""


def role_rows(ledger: Ledger) -> list[dict[str, Any]]:
    """Each node's standing role as the log says it. Who is present no log knows."""
    grant = ledger.grant()
    return [
        {
            "node": author.hex(),
            "name": ledger.name(author),
            "role": ledger.standing_role(author),
            "term": grant.term if grant is not None and grant.trainer == author else None,
        }
        for author in ledger.authors()
    ]


def credits(ledger: Ledger) -> dict[str, Any]:
    """Every account, final entries only, the richest first. ``ended`` says what became of a node whose feed was closed
    or moved, ``goes_on_as`` as whom; ``goes_on_for`` lists the nodes whose accounts are part of this one."""
    rows = []
    endings = ledger.replica.endings
    for author, entry in ledger.accounts(final=True).items():
        owner = endings.owner(author)
        row = {
            **{"node": author.hex(), "name": ledger.name(author), "role": ledger.standing_role(author)},
            **account(entry, entry),
            "ended": None if author not in endings.ended else "closed" if owner == author else "moved",
            "goes_on_as": None if owner == author else owner.hex(),
            "goes_on_for": [old.hex() for old in endings.lost(author)],
        }
        rows.append(row)
    return {"domain": ledger.domain.id.hex(), "nodes": sorted(rows, key=lambda row: (-row["credit"], row["node"]))}


def account(live: Account, final: Account | None) -> dict[str, Any]:
    """A node's account: ``final`` counts, except ``pending``, which is what is undecided now."""
    value = asdict(live if final is None else final)
    if final is None:  # not even its join is final: whatever it did does not count yet
        value.update(credit=0, generated=0, audited=0, trained=0)
    return {**value, "pending": live.pending}


def step_row(step: Step) -> dict[str, Any]:
    """What a ``step`` entry says; fractions as floats."""
    return {
        "step": step.number,
        "reward": step.reward / 1e6,
        "lag_mean": step.lag_mean / 1e6,
        **{name: getattr(step, name) for name in AS_IT_IS},
    }
