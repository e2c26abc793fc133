"""``proofs.checks``: each check by itself, at and beyond its bound, and the table of reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proofs import checks
from proofs.checks import FLOAT32_THRESHOLDS, GROUP_FACTOR, REASONS, GroupReplay
from protocol.domain import Thresholds
from protocol.errors import LocalError
from protocol.records import Rollout, Verdict, parse_payload
from protocol.rollout import FINISH_END, FINISH_LENGTH, Group, Response, Submission
from tests.protocol.builders import RECIPE, digest

END = 0
THRESHOLDS = Thresholds(
    deficit_mean=1_000,
    mismatch_share=10_000,
    activation_mismatch_share=50_000,
    mantissa_mean=500_000,
    mantissa_median=1_000_000,
    logprob_error=5_000,
)
EXACT = GroupReplay(100, 0, 0, 0, 32, 0, 0, 0)


def response(*tokens: int, finish: int = FINISH_END, reward: int = 0) -> Response:
    return Response(tokens, (0,) * len(tokens), reward, finish)


GROUP = Group(4, (1, 2), tuple(response(5, END) for _ in range(4)), b"")
SUBMISSION = Submission(digest("domain"), digest("weights"), digest("author"), 4, (GROUP, replace(GROUP, counter=5)))
ROLLOUT = Rollout(digest("weights"), 4, 2, 8, 16, digest("file"), 1000)


def test_every_reason_makes_a_verdict_that_the_log_accepts() -> None:
    for code in REASONS:
        outcome = checks.result(code, score=3, audited=1)
        assert outcome.words
        verdict = Verdict(digest("rollout"), outcome.outcome, outcome.severity, code, outcome.score, bytes(64), 1)
        assert parse_payload("verdict", verdict.to_value()) == verdict


def test_lies_are_hard_and_absences_soft() -> None:
    hard = {code for code, reason in REASONS.items() if reason.severity == "hard"}
    assert hard == {
        *("malformed", "wrong-header", "wrong-prompt", "bounds", "termination"),
        *("sampling", "logprobs", "activations", "reward"),
    }
    void = {code for code, reason in REASONS.items() if reason.outcome == "void"}
    assert void == {"undecidable", "understated", "gap", "ineligible", "duplicate"}


def test_the_header_is_what_the_entry_announced() -> None:
    assert checks.header_matches(SUBMISSION, digest("domain"), digest("author"), ROLLOUT)
    assert not checks.header_matches(SUBMISSION, digest("other"), digest("author"), ROLLOUT)
    assert not checks.header_matches(SUBMISSION, digest("domain"), digest("other"), ROLLOUT)
    for rollout in (
        replace(ROLLOUT, weights=digest("other")),
        replace(ROLLOUT, first_counter=5),
        replace(ROLLOUT, groups=3),
        replace(ROLLOUT, responses=9),
        replace(ROLLOUT, tokens=17),
    ):
        assert not checks.header_matches(SUBMISSION, digest("domain"), digest("author"), rollout)


def test_tokens_are_below_the_vocabulary() -> None:
    assert checks.within_vocabulary(SUBMISSION, 6)
    assert not checks.within_vocabulary(SUBMISSION, 5)
    prompt = replace(SUBMISSION, groups=(replace(GROUP, prompt=(6,)),))
    assert not checks.within_vocabulary(prompt, 6)


def test_the_prompt_is_compared_token_by_token() -> None:
    assert checks.prompt_matches(GROUP, [1, 2])
    assert not checks.prompt_matches(GROUP, [1, 2, 3])
    assert not checks.prompt_matches(GROUP, [2, 1])
    assert not checks.prompt_matches(GROUP, [])


@pytest.mark.parametrize(
    ("tokens", "finish", "right"),
    [
        ((5, END), FINISH_END, True),
        ((END,), FINISH_END, True),
        ((5,) * 7 + (END,), FINISH_END, True),
        ((5,) * 8, FINISH_LENGTH, True),
        ((5,) * 7, FINISH_LENGTH, False),
        ((5,) * 8, FINISH_END, False),
        ((5, 5), FINISH_END, False),
        ((5, END), FINISH_LENGTH, False),
        ((5,) * 7 + (END,), FINISH_LENGTH, False),
        ((END, 5, END), FINISH_END, False),
        ((END,) + (5,) * 7, FINISH_LENGTH, False),
        ((5, END, END), FINISH_END, False),
    ],
)
def test_a_response_ends_where_it_must(tokens: tuple[int, ...], finish: int, right: bool) -> None:
    assert RECIPE.max_response_tokens == 8
    assert checks.terminated(response(*tokens, finish=finish), RECIPE, END) is right


def test_the_mean_deficit_is_bounded() -> None:
    at = [replace(EXACT, deficit_sum=200_000, mismatches=1), EXACT]
    assert checks.sampling_holds(at, THRESHOLDS)
    assert not checks.sampling_holds([replace(at[0], deficit_sum=200_001), EXACT], THRESHOLDS)


def test_the_share_of_other_tokens_is_bounded_with_one_to_spare() -> None:
    assert checks.sampling_holds([replace(EXACT, mismatches=2)], THRESHOLDS)
    assert not checks.sampling_holds([replace(EXACT, mismatches=3)], THRESHOLDS)
    tiny = replace(EXACT, tokens=4)
    assert checks.sampling_holds([replace(tiny, mismatches=1, deficit_sum=20)], THRESHOLDS)
    assert not checks.sampling_holds([replace(tiny, mismatches=2, deficit_sum=20)], THRESHOLDS)


def test_one_wrong_group_cannot_hide_among_many() -> None:
    right = [EXACT] * 99
    for bad in (
        replace(EXACT, deficit_sum=GROUP_FACTOR * 100_000 + 1),
        replace(EXACT, mismatches=GROUP_FACTOR + 2),
    ):
        pooled = replace(bad, tokens=10_000)
        assert checks.sampling_holds([pooled], THRESHOLDS)  # as a mean over all, it would pass
        assert not checks.sampling_holds([*right, bad], THRESHOLDS)
    for bad in (
        replace(EXACT, activation_mismatches=8),
        replace(EXACT, mantissa_sum=65),
        replace(EXACT, mantissa_median=2),
    ):
        assert not checks.activations_hold([*right, bad], THRESHOLDS)
    assert not checks.logprobs_hold([*right, replace(EXACT, logprob_error_max=5_001)], THRESHOLDS)
    assert not checks.proofs_parsed([*right, replace(EXACT, activation_values=0)])


def test_activations_pass_up_to_their_bounds() -> None:
    for good in (
        EXACT,
        replace(EXACT, activation_mismatches=2),
        replace(EXACT, mantissa_sum=16, mantissa_median=1),
    ):
        assert checks.activations_hold([good], THRESHOLDS)
    for bad in (
        replace(EXACT, activation_mismatches=3),
        replace(EXACT, mantissa_sum=17),
        replace(EXACT, activation_mismatches=32, mantissa_median=128),
    ):
        assert not checks.activations_hold([bad], THRESHOLDS)


def test_log_probabilities_pass_up_to_their_bound() -> None:
    assert checks.logprobs_hold([replace(EXACT, logprob_error_max=5_000)], THRESHOLDS)
    assert not checks.logprobs_hold([replace(EXACT, logprob_error_max=5_001)], THRESHOLDS)


def test_the_score_is_the_mean_deficit_rounded_up() -> None:
    assert checks.score([]) == 0
    assert checks.score([EXACT, EXACT]) == 0
    assert checks.score([replace(EXACT, deficit_sum=1), EXACT]) == 1
    assert checks.score([replace(EXACT, deficit_sum=400_000), EXACT]) == 2_000


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0, 10, 20, 30], "ok"),
        ([0, 10, 20, 29], "reward"),
        ([0, 10, 20, 31], "understated"),
        ([0, 10, 20, None], "undecidable"),
        ([None] * 4, "undecidable"),
        ([0, 9, 20, None], "reward"),
        ([0, 11, 20, None], "understated"),
        ([1, 9, 20, 30], "reward"),
    ],
)
def test_a_claim_too_high_outweighs_all_else(rewards: list[int | None], reason: str) -> None:
    group = replace(GROUP, responses=tuple(response(END, reward=10 * index) for index in range(4)))
    assert checks.rewards_reason(group, rewards) == reason


def test_rewards_must_fit_the_group() -> None:
    with pytest.raises(LocalError):
        checks.rewards_reason(GROUP, [0] * 3)


def test_float32_limits_pass_honest_differences_and_no_more() -> None:
    # 256 tokens of which one flips at a gap of 1e-5; 0.5 % of 64 values cross a rounding boundary
    honest = GroupReplay(256, 1, 10, 30, 64, 1, 1, 0)
    assert checks.sampling_holds([honest], FLOAT32_THRESHOLDS)
    assert checks.logprobs_hold([honest], FLOAT32_THRESHOLDS)
    assert checks.activations_hold([honest], FLOAT32_THRESHOLDS)
    # honest bfloat16 and int8 weights, as measured: what a float32 domain does not accept
    for other in (replace(honest, mismatches=7, deficit_sum=600_000), replace(honest, mismatches=11)):
        assert not checks.sampling_holds([other], FLOAT32_THRESHOLDS)
    assert not checks.activations_hold([replace(honest, mantissa_sum=160, mantissa_median=2)], FLOAT32_THRESHOLDS)
