"""How far everybody is trusted after a cut: what the final fold says of it goes into the history.

1. The standing of everybody about whose submissions the cut decided is noted, and of those whose feeds it ended.
2. Reputations are noted where the policy asks validators for any: of those who stand as validators, or did.
3. What another author did who goes on for it (``protocol.log.recovery``) counts for whoever owns it in that cut.
"""

from __future__ import annotations

from protocol.credit.fold import Fold
from protocol.credit.history import History
from protocol.domain import Policy
from protocol.log.endings import Endings
from protocol.log.quorum import Cut


def note(history: History, fold: Fold, cut: Cut, endings: Endings, policy: Policy) -> None:
    """Note in ``history`` what the cut changed, whose entries ``fold`` has taken and closed."""
    height = cut.height
    touched, ended = fold.touched, endings.at(height)
    for author in ended:
        history.end(author, height)
    for author in {endings.owner(author, height) for author in (*touched, *ended)}:
        history.judge(author, height, fold.standing([author, *endings.lost(author, height)]))
    if policy.validator_reputation > 0:
        touched.update(head.author for head in cut.changes)
        touched.update(ended)
        for author in {endings.owner(author, height) for author in touched}:
            if history.tracked(author) or history.role(author, height) == "validator":
                account = fold.account([author, *endings.lost(author, height)])
                history.trust(author, height, account.reputation)
    touched.clear()
