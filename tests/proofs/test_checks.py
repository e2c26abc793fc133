"""``proofs.checks``: each check by itself, at and beyond its bound, and the table of reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proofs import checks
from proofs.checks import FLOAT32_THRESHOLDS, GROUP_FACTOR, HARD_FACTOR, REASONS, GroupReplay
from protocol.domain import Thresholds
from protocol.errors import LocalError
from protocol.records import Rollout, Verdict, parse_payload
from protocol.work.rollout import FINISH_END, FINISH_LENGTH, Group, Response, Submission
from tests.protocol.builders import RECIPE, digest

END = 0
THRESHOLDS = Thresholds(
    deficit_clip=250_000,
    deficit_honest=1_000,
    deficit_mean=20_000,
    mismatch_share=10_000,
    activation_mismatch_share=50_000,
    mantissa_mean=500_000,
    mantissa_median=1_000_000,
    logprob_error=5_000,
)
EXACT = GroupReplay(100, 0, 0, 0, 0, 32, 0, 0, 0)


def response(*tokens: int, finish: int = FINISH_END, reward: int = 0) -> Response:
    return Response(tokens, (0,) * len(tokens), reward, finish)


GROUP = Group(4, (1, 2), tuple(response(5, END) for _ in range(4)), b"")
SUBMISSION = Submission(digest("domain"), digest("weights"), digest("author"), 4, (GROUP, replace(GROUP, counter=5)))
ROLLOUT = Rollout(digest("weights"), 4, 2, 8, 16, digest("file"), 1000, 0)


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
        *("sampling", "logprobs", "activations", "drift", "copied", "reward"),
    }
    void = {code for code, reason in REASONS.items() if reason.outcome == "void"}
    assert void == {"undecidable", "understated", "gap", "ineligible", "duplicate", "unjudged"}


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
        replace(ROLLOUT, signal=1),
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


def test_deficits_are_evidence_beyond_what_chance_explains() -> None:
    # Each clip's worth of deficit is ln 20 nats, each token costs 0.019.
    for clips, tokens, reason in (
        (3, 0, "ok"),
        (4, 0, "borderline"),
        (4, 100, "ok"),
        (7, 0, "borderline"),
        (8, 0, "sampling"),
    ):
        replay = replace(EXACT, tokens=100 + tokens, mismatches=1, deficit_sum=clips * 1_000_000)
        assert checks.sampling_reason([replay], THRESHOLDS) == reason
    # The same deficits are no evidence in a submission that is long enough.
    assert checks.sampling_reason([replace(EXACT, tokens=2_000, deficit_sum=8_000_000)], THRESHOLDS) == "ok"


def test_the_share_of_other_tokens_is_bounded_with_one_to_spare() -> None:
    for mismatches, reason in ((2, "ok"), (3, "borderline"), (5, "borderline"), (6, "sampling")):
        assert checks.sampling_reason([replace(EXACT, mismatches=mismatches)], THRESHOLDS) == reason
    tiny = replace(EXACT, tokens=4, deficit_sum=20)
    assert checks.sampling_reason([replace(tiny, mismatches=1)], THRESHOLDS) == "ok"
    assert checks.sampling_reason([replace(tiny, mismatches=2)], THRESHOLDS) == "sampling"


def test_one_wrong_group_cannot_hide_among_many() -> None:
    right = [EXACT] * 99
    bad = replace(EXACT, deficit_sum=9_000_000)
    pooled = replace(bad, tokens=10_000)
    assert checks.sampling_reason([pooled], THRESHOLDS) == "ok"  # as a mean over all, it would pass
    assert checks.sampling_reason([*right, bad], THRESHOLDS) == "sampling"
    assert checks.sampling_reason([*right, replace(EXACT, mismatches=GROUP_FACTOR + 2)], THRESHOLDS) == "borderline"
    wide = HARD_FACTOR * GROUP_FACTOR
    for figures, reason in (
        ({"activation_mismatches": 8}, "borderline"),
        ({"activation_mismatches": 27}, "activations"),
        ({"mantissa_sum": 65}, "borderline"),
        ({"mantissa_sum": wide * 16 + 1}, "activations"),
        ({"mantissa_median": 2}, "borderline"),
        ({"mantissa_median": 5}, "activations"),
    ):
        assert checks.activations_reason([*right, replace(EXACT, **figures)], THRESHOLDS) == reason
    assert checks.logprobs_reason([*right, replace(EXACT, logprob_error_max=5_001)], THRESHOLDS) == "borderline"
    assert not checks.proofs_parsed([*right, replace(EXACT, activation_values=0)])


def test_activations_pass_up_to_their_bounds() -> None:
    for good in (
        EXACT,
        replace(EXACT, activation_mismatches=2),
        replace(EXACT, mantissa_sum=16, mantissa_median=1),
    ):
        assert checks.activations_reason([good], THRESHOLDS) == "ok"
    for border in (replace(EXACT, activation_mismatches=3), replace(EXACT, mantissa_sum=17)):
        assert checks.activations_reason([border], THRESHOLDS) == "borderline"
    for bad in (
        replace(EXACT, activation_mismatches=8),
        replace(EXACT, mantissa_sum=65),
        replace(EXACT, activation_mismatches=32, mantissa_median=128),
    ):
        assert checks.activations_reason([bad], THRESHOLDS) == "activations"


def test_log_probabilities_pass_up_to_their_bound() -> None:
    for worst, reason in ((5_000, "ok"), (5_001, "borderline"), (20_000, "borderline"), (20_001, "logprobs")):
        assert checks.logprobs_reason([EXACT, replace(EXACT, logprob_error_max=worst)], THRESHOLDS) == reason


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


def test_a_single_choice_by_hand_is_found_however_right_the_others_are() -> None:
    def about(worst: int) -> GroupReplay:
        return replace(EXACT, tokens=10_000, mismatches=1, deficit_sum=1_000_000, deficit_max=worst)

    assert checks.sampling_evidence([about(10**7)], FLOAT32_THRESHOLDS) < 0  # the mean forgives it
    limit = FLOAT32_THRESHOLDS.logprob_error
    rows = ((limit, "ok"), (limit + 1, "borderline"), (4 * limit, "borderline"), (4 * limit + 1, "sampling"))
    for worst, reason in rows:
        assert checks.sampling_reason([EXACT, about(worst)], FLOAT32_THRESHOLDS) == reason
        assert checks.hopeless(about(worst), FLOAT32_THRESHOLDS) == (reason == "sampling")


def test_hopeless_is_what_is_hard_whatever_stands_beside_it() -> None:
    assert checks.hopeless(replace(EXACT, activation_values=0), FLOAT32_THRESHOLDS)
    assert checks.hopeless(replace(EXACT, deficit_sum=8_000_000), FLOAT32_THRESHOLDS)
    for near in (EXACT, replace(EXACT, deficit_sum=5_000_000), replace(EXACT, logprob_error_max=10**7)):
        assert not checks.hopeless(near, FLOAT32_THRESHOLDS)


def test_rewards_must_fit_the_group() -> None:
    with pytest.raises(LocalError):
        checks.rewards_reason(GROUP, [0] * 3)


def said(replay: GroupReplay) -> list[str]:
    checked = (checks.sampling_reason, checks.logprobs_reason, checks.activations_reason)
    return [check([replay], FLOAT32_THRESHOLDS) for check in checked]


def test_float32_limits_pass_honest_differences_and_no_more() -> None:
    # 256 tokens of which one flips at a gap of 1e-5, a hundredth of the clip; 0.5 % of 64 values cross a rounding
    # boundary
    honest = GroupReplay(256, 1, 10_000, 10, 30, 64, 1, 1, 0)
    assert said(honest) == ["ok", "ok", "ok"]
    # honest bfloat16, as measured: what a float32 domain does not accept
    assert said(replace(honest, mismatches=7, deficit_sum=7_000_000))[0] == "sampling"
    assert said(replace(honest, mismatches=11))[0] == "borderline"
    assert said(replace(honest, mantissa_sum=93, mantissa_median=1))[2] == "activations"
