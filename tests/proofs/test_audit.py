"""``proofs.audit``: the order of the checks, and verdicts on honest and forged runs of a toy model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from proofs import activation, audit, sampling
from proofs.audit import AuditResult, GroupReplay
from proofs.checks import FLOAT32_THRESHOLDS
from protocol.constants import MILLION
from protocol.credit import sequential_test
from protocol.credit.sequential_test import NEWCOMER, Standing
from protocol.errors import LocalError
from protocol.work.rollout import FINISH_LENGTH, Group, Response, Submission
from tests.protocol.builders import RECIPE, digest

END, VOCABULARY = 0, 40
PROMPT = (1, 2)
EXACT = GroupReplay(32, 0, 0, 0, 0, 32, 0, 0, 0)
RESPONSE = Response((5,) * 8, (0,) * 8, 100, FINISH_LENGTH)
GROUP = Group(4, PROMPT, (RESPONSE,) * 4, b"proofs")
SUBMISSION = Submission(digest("domain"), digest("weights"), digest("author"), 4, (GROUP, replace(GROUP, counter=5)))
REWARDS: Sequence[int | None] = (100,) * 4


def judge(
    submission: Submission = SUBMISSION,
    *,
    prompt: tuple[int, ...] = PROMPT,
    replay: GroupReplay = EXACT,
    rewards: Sequence[int | None] = REWARDS,
    group: int = 1,
) -> AuditResult:
    """All checks in order."""
    seen = audit.inspect(submission, {group: prompt}, RECIPE, END, VOCABULARY)
    if seen.outcome != "accepted":
        return seen
    return audit.audit_rewards(
        submission, {group: rewards}, audit.audit_replay(submission, {group: replay}, FLOAT32_THRESHOLDS)
    )


def with_response(response: Response, group: int = 1) -> Submission:
    groups = list(SUBMISSION.groups)
    groups[group] = replace(groups[group], responses=(*groups[group].responses[:3], response))
    return replace(SUBMISSION, groups=tuple(groups))


def test_an_exact_submission_is_accepted() -> None:
    result = judge()
    assert (result.outcome, result.severity, result.reason) == ("accepted", "none", "ok")
    assert (result.score, result.audited) == (0, 1)


BAD_TOKENS = replace(RESPONSE, tokens=(VOCABULARY,) * 8)
CUT_SHORT = replace(RESPONSE, tokens=(5,) * 7, logprobs=(0,) * 7)
FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("bounds", {"submission": with_response(BAD_TOKENS)}),
    ("wrong-prompt", {"prompt": (2, 1)}),
    ("termination", {"submission": with_response(CUT_SHORT), "replay": replace(EXACT, tokens=31)}),
    ("malformed", {"replay": replace(EXACT, activation_values=0)}),
    ("sampling", {"replay": replace(EXACT, mismatches=20, deficit_sum=10_000_000)}),
    ("logprobs", {"replay": replace(EXACT, logprob_error_max=20_001)}),
    ("activations", {"replay": replace(EXACT, activation_mismatches=20)}),
    ("reward", {"rewards": (100, 100, 100, 0)}),
]


@pytest.mark.parametrize(("reason", "fault"), FAULTS)
def test_each_fault_has_its_reason(reason: str, fault: dict[str, Any]) -> None:
    result = judge(**fault)
    assert (result.outcome, result.severity, result.reason) == ("rejected", "hard", reason)


def test_the_first_check_that_fails_decides() -> None:
    order = ["malformed", "sampling", "logprobs", "activations"]
    changes = [fault["replay"] for reason, fault in FAULTS if reason in order]
    for first, reason in enumerate(order):
        replay = EXACT
        for change in changes[first:]:
            assert isinstance(change, GroupReplay)
            moved = {
                field: getattr(change, field)
                for field in GroupReplay.__dataclass_fields__
                if getattr(change, field) != getattr(EXACT, field)
            }
            replay = replace(replay, **moved)
        assert judge(replay=replay, rewards=(0,) * 4).reason == reason
        assert judge(replay=replay, prompt=(7,)).reason == "wrong-prompt"
        assert judge(with_response(BAD_TOKENS), replay=replay, prompt=(7,)).reason == "bounds"


def test_what_needs_no_replay_is_checked_in_groups_that_are_not_audited_too() -> None:
    assert judge(with_response(BAD_TOKENS, group=0)).reason == "bounds"
    assert judge(with_response(CUT_SHORT, group=0)).reason == "termination"


def test_an_undecidable_reward_blames_nobody() -> None:
    result = judge(rewards=(100, None, 100, 100))
    assert (result.outcome, result.severity, result.reason) == ("void", "soft", "undecidable")
    assert judge(rewards=(100, None, 100, 0)).reason == "reward"


def test_a_wrong_reward_in_one_group_outweighs_an_undecidable_one_in_another() -> None:
    before = audit.audit_replay(SUBMISSION, {0: EXACT, 1: EXACT}, FLOAT32_THRESHOLDS)
    assert before.audited == 2
    assert audit.audit_rewards(SUBMISSION, {0: [None] * 4, 1: [0] * 4}, before).reason == "reward"
    assert audit.audit_rewards(SUBMISSION, {0: [None] * 4, 1: [100] * 4}, before).reason == "undecidable"


def test_rewards_do_not_change_what_replay_rejected() -> None:
    before = audit.audit_replay(SUBMISSION, {1: replace(EXACT, logprob_error_max=10**6)}, FLOAT32_THRESHOLDS)
    assert audit.audit_rewards(SUBMISSION, {1: REWARDS}, before) is before


def test_the_score_survives_to_the_verdict() -> None:
    replay = replace(EXACT, mismatches=1, deficit_sum=320)
    assert judge(replay=replay).score == 10
    assert judge(replay=replay, rewards=(0,) * 4).score == 10


def test_measurements_that_do_not_fit_are_our_own_mistake() -> None:
    with pytest.raises(LocalError):
        judge(replay=replace(EXACT, tokens=31))
    with pytest.raises(LocalError):
        judge(group=2)
    with pytest.raises(LocalError):
        audit.audit_replay(SUBMISSION, {}, FLOAT32_THRESHOLDS)
    accepted = audit.audit_replay(SUBMISSION, {0: EXACT, 1: EXACT}, FLOAT32_THRESHOLDS)
    with pytest.raises(LocalError):
        audit.audit_rewards(SUBMISSION, {1: REWARDS}, accepted)


def replayed(replay: GroupReplay, standing: Standing = NEWCOMER) -> AuditResult:
    return audit.audit_replay(SUBMISSION, {1: replay}, FLOAT32_THRESHOLDS, standing)


def test_what_is_near_a_bound_is_borderline_and_soft() -> None:
    for near in ({"logprob_error_max": 5_001}, {"mantissa_median": 1}, {"mismatches": 2}, {"deficit_sum": 4_000_000}):
        found = replayed(replace(EXACT, **near))
        assert (found.outcome, found.severity, found.reason) == ("rejected", "soft", "borderline")
    # Nothing borderline excuses what is hard.
    assert replayed(replace(EXACT, mismatches=2, logprob_error_max=20_001)).reason == "logprobs"
    assert judge(replay=replace(EXACT, mantissa_median=1), rewards=(0,) * 4).reason == "borderline"


def test_many_submissions_that_each_pass_convict_together() -> None:
    off = replace(EXACT, mismatches=1, deficit_sum=1_000_000)  # ln 20 nats
    standing, reasons = NEWCOMER, []
    for _ in range(5):
        found = replayed(off, standing)
        reasons.append(found.reason)
        assert found.score == 31_250
        standing = standing.after(sequential_test.gain(1_000_000, 32, 50, 1_000), found.reason == "borderline")
    assert reasons == ["ok"] * 4 + ["drift"]
    assert replayed(EXACT, standing).reason == "drift"  # the test has run its course, whatever this one is like
    assert (found.outcome, found.severity) == ("rejected", "hard")
    assert judge().reason == "ok"


def test_a_third_borderline_submission_in_a_row_convicts() -> None:
    standing = NEWCOMER.after(0, True).after(0, True)
    assert replayed(EXACT, standing).reason == "ok"
    assert replayed(replace(EXACT, mantissa_median=1), standing).reason == "drift"
    assert replayed(replace(EXACT, logprob_error_max=10**6), standing).reason == "logprobs"


class Toy:
    """A model of one linear layer over token embeddings and positions; ``noise`` perturbs its weights."""

    def __init__(self, noise: float = 0.0, rounding: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embed = torch.randn(VOCABULARY, 64, generator=generator)
        self.head = torch.randn(64, VOCABULARY, generator=generator) / 4
        other = torch.Generator().manual_seed(2)
        for weights in (self.embed, self.head):
            weights += noise * weights.std() * torch.randn(weights.shape, generator=other)
        self._rounding, self._other = rounding, other

    def states(self, last: Tensor, position: int) -> Tensor:
        """The hidden states [n, 64] after tokens ``last`` [n]."""
        hidden = torch.tanh(self.embed[last] * (1 + position / 10)) * 3
        return hidden * (1 + self._rounding * torch.randn(hidden.shape, generator=self._other))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head


CLIP = FLOAT32_THRESHOLDS.deficit_clip / 1e6
SEED = digest("prompt seed")
COUNT = 32


def generate(model: Toy) -> Group:
    """A group of 32 responses of 8 tokens (no end token: its logit is kept down)."""
    last = torch.full((COUNT,), PROMPT[-1])
    tokens, logprobs, states = [], [], []
    for position in range(8):
        hidden = model.states(last, position)
        logits = model.logits(hidden)
        logits[:, END] = -30
        keys = sampling.keys_tensor([(SEED, row, position) for row in range(COUNT)])
        last = sampling.choose(logits, keys, 1.0)
        tokens.append(last)
        logprobs.append(sampling.logprobs(logits, last, 1.0))
        states.append(hidden)
    rows = torch.stack(tokens, 1).tolist()
    reported = torch.stack(logprobs, 1).tolist()
    responses = tuple(
        Response(tuple(row), tuple(round(-value * MILLION) for value in values), 100, FINISH_LENGTH)
        for row, values in zip(rows, reported, strict=True)
    )
    flat = torch.stack(states, 1).reshape(-1, 64).numpy()
    return Group(4, PROMPT, responses, activation.build(flat))


def replay(model: Toy, group: Group) -> GroupReplay:
    """What a verifier with ``model`` measures."""
    tokens = torch.tensor([response.tokens for response in group.responses])
    reported = torch.tensor([response.logprobs for response in group.responses]) / -1e6
    last = torch.full((COUNT,), PROMPT[-1])
    deficits, errors, states = [], [], []
    for position in range(8):
        hidden = model.states(last, position)
        logits = model.logits(hidden)
        logits[:, END] = -30
        keys = sampling.keys_tensor([(SEED, row, position) for row in range(COUNT)])
        last = tokens[:, position]
        deficits.append((sampling.deficits(logits, keys, last, 1.0) / CLIP).clamp(max=1))
        errors.append((sampling.logprobs(logits, last, 1.0) - reported[:, position]).abs())
        states.append(hidden)
    deficit = torch.stack(deficits)
    found = activation.verify(torch.stack(states, 1).reshape(-1, 64).numpy().astype(np.float32), group.proofs)
    return GroupReplay(
        tokens.numel(),
        int((deficit > 0).sum()),
        int((deficit * 1e6).ceil().sum()),
        int(deficit.max() * CLIP * 1e6),
        int(torch.stack(errors).max() * 1e6),
        found.values,
        found.mismatches,
        found.mantissa_sum,
        found.mantissa_median,
    )


def verdict(prover: Toy, forge: Group | None = None) -> str:
    group = forge or generate(prover)
    submission = replace(SUBMISSION, groups=(group,))
    measured = replay(Toy(rounding=1e-6), group)
    return audit.audit_replay(submission, {0: measured}, FLOAT32_THRESHOLDS).reason


def test_honest_rounding_passes() -> None:
    assert verdict(Toy(rounding=1e-6)) == "ok"


@pytest.mark.parametrize(("noise", "reason"), [(0.05, "sampling"), (0.02, "logprobs")])
def test_wrong_weights_are_caught(noise: float, reason: str) -> None:
    assert verdict(Toy(noise=noise)) == reason


def test_wrong_log_probabilities_are_caught() -> None:
    group = generate(Toy())
    lifted = tuple(
        replace(response, logprobs=tuple(value + 25_000 for value in response.logprobs)) for response in group.responses
    )
    assert verdict(Toy(), replace(group, responses=lifted)) == "logprobs"


def test_proofs_of_other_states_are_caught() -> None:
    group = generate(Toy())
    assert verdict(Toy(), replace(group, proofs=generate(Toy(noise=0.02)).proofs)) == "activations"
