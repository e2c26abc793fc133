"""The audit of one submission: the checks in order, and the first that fails decides.

1. The order is: bounds, prompts, termination (``inspect``: cheap, and what must hold before an engine may look at the
   tokens); format of the proofs, sampling, log-probabilities, activations (``audit_replay``); rewards
   (``audit_rewards``: scorers read the author's text, and so run on what replay has confirmed only). That the file
   parses and is what was announced (``checks.header_matches``) comes before all of them.
2. Bounds and termination are checked for all groups, the rest for the audited ones: those that the validator's
   draw picked (``protocol.work.schedule``). At least one is audited.
3. Among the audited groups a provably wrong reward outweighs an undecidable one. One undecidable reward voids
   the submission.
4. A failure of the statistics is hard, or it is borderline: soft, but evidence against the author. An author whose
   submissions are convicting all together (``protocol.credit.sequential_test``) is rejected for that ("drift"),
   whatever this one is like. Its standing is that of the cut that the version anchors on, so all who are due judge by
   the same.
5. Equal measurements give equal results: there is no clock, no randomness and no float here.

Measurements and rewards come from our own children: where they do not fit the submission, that is a ``LocalError``,
and the author is not judged by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proofs import checks
from proofs.checks import AuditResult, GroupReplay
from protocol.credit.reputation import BORDERLINE
from protocol.credit.sequential_test import NEWCOMER, Standing
from protocol.domain import Recipe, Thresholds
from protocol.errors import LocalError
from protocol.work.rollout import Submission

__all__ = ["AuditResult", "GroupReplay", "audit_replay", "audit_rewards", "inspect"]


def inspect(
    submission: Submission, prompts: Mapping[int, Sequence[int]], recipe: Recipe, end_token: int, vocabulary: int
) -> AuditResult:
    """What can be said without replay. ``prompts`` are the prescribed prompts, by index, of all groups or some.

    The result is "ok" where nothing is wrong so far, with no group counted as audited.
    """
    _indices(submission, prompts)
    if not checks.within_vocabulary(submission, vocabulary):
        return checks.result("bounds")
    if not all(checks.prompt_matches(submission.groups[index], prompt) for index, prompt in prompts.items()):
        return checks.result("wrong-prompt")
    responses = (response for group in submission.groups for response in group.responses)
    if not all(checks.terminated(response, recipe, end_token) for response in responses):
        return checks.result("termination")
    return checks.result("ok")


def audit_replay(
    submission: Submission,
    replays: Mapping[int, GroupReplay],
    thresholds: Thresholds,
    standing: Standing = NEWCOMER,
) -> AuditResult:
    """What the replays of the audited groups, by index, say, of an author with this ``standing``."""
    _indices(submission, replays)
    for index, replay in replays.items():
        tokens = sum(len(response.tokens) for response in submission.groups[index].responses)
        if replay.tokens != tokens:
            raise LocalError(f"the replay of group {index} covers {replay.tokens} tokens of {tokens}")
    measured = [replays[index] for index in sorted(replays)]
    reason = _reason(measured, thresholds)
    if reason in ("ok", BORDERLINE):
        gain = checks.evidence(measured, thresholds)
        if standing.convicts or standing.after(gain, reason == BORDERLINE).convicts:
            reason = "drift"
    return checks.result(reason, score=checks.score(measured), audited=len(measured))


def _reason(measured: Sequence[GroupReplay], thresholds: Thresholds) -> str:
    """The first hard failure, else whether anything is borderline."""
    if not checks.proofs_parsed(measured):
        return "malformed"
    found = [
        check(measured, thresholds)
        for check in (checks.sampling_reason, checks.logprobs_reason, checks.activations_reason)
    ]
    hard = [reason for reason in found if reason not in ("ok", BORDERLINE)]
    return hard[0] if hard else max(found, key=lambda reason: reason == BORDERLINE)


def audit_rewards(
    submission: Submission, rewards: Mapping[int, Sequence[int | None]], before: AuditResult
) -> AuditResult:
    """The final result, where ``before`` is ``audit_replay``'s and ``rewards`` are the recomputed rewards (micro, None
    where undecidable) of the audited groups, by index. A ``before`` that did not accept stands."""
    if before.outcome != "accepted":
        return before
    _indices(submission, rewards)
    if len(rewards) != before.audited:
        raise LocalError(f"rewards of {len(rewards)} groups, but {before.audited} were replayed")
    reasons = {checks.rewards_reason(submission.groups[index], scored) for index, scored in rewards.items()}
    reason = next(code for code in ("reward", "understated", "undecidable", "ok") if code in reasons)
    return checks.result(reason, score=before.score, audited=before.audited)


def _indices(submission: Submission, audited: Mapping[int, object]) -> None:
    if not audited:
        raise LocalError("an audit replays at least one group")
    if not all(0 <= index < len(submission.groups) for index in audited):
        raise LocalError("an audited group is not in the submission")
