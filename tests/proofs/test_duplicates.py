"""``proofs.duplicates``: copies are noticed, coincidences are not."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from proofs.duplicates import Index, Pair
from protocol.constants import MILLION
from protocol.work.rollout import FINISH_LENGTH, Group, Response, Submission
from tests.protocol.builders import digest


def response(seed: int, tokens: int = 256, surprise: int = MILLION) -> Response:
    generator = Random(seed)
    line = tuple(generator.randrange(50_000) for _ in range(tokens))
    return Response(line, (surprise,) * tokens, 0, FINISH_LENGTH)


def submission(author: str, *responses: Response) -> Submission:
    return Submission(digest("domain"), digest("weights"), digest(author), 0, (Group(0, (1,), responses, b""),))


def found(index: Index, made: Submission, entry: str) -> list[tuple[int, str]]:
    names = {digest(name): name for name in ("a", "b", "c")}
    return [(pair.response, names[pair.earlier.author]) for pair in index.take(made, digest(entry))]


def test_a_copy_is_noticed_whoever_sends_it() -> None:
    index = Index()
    assert found(index, submission("a", response(1), response(2)), "1") == []
    assert found(index, submission("b", response(3), response(2)), "2") == [(1, "a")]
    assert found(index, submission("a", response(1)), "3") == [(0, "a")]
    pair = index.take(submission("c", response(2)), digest("4"))[0]
    assert isinstance(pair, Pair)
    assert (pair.group, pair.earlier.submission, pair.earlier.response) == (0, digest("1"), 1)


def test_a_copy_with_changes_is_noticed_and_a_short_stretch_is_not() -> None:
    index = Index()
    original = response(1)
    assert found(index, submission("a", original), "1") == []
    changed = list(original.tokens)
    for place in range(0, 256, 40):
        changed[place] = 7
    assert found(index, submission("b", replace(original, tokens=tuple(changed))), "2") == [(0, "a")]
    shifted = replace(original, tokens=(9, 9, 9, *original.tokens[:-3]))
    assert found(index, submission("b", shifted), "3") == [(0, "a")]
    other = response(5)
    quoted = replace(other, tokens=original.tokens[:16] + other.tokens[16:])
    assert found(index, submission("c", quoted), "4") == []


def test_equal_answers_that_were_likely_are_no_copies() -> None:
    index = Index()
    short, sure = response(1, tokens=4, surprise=MILLION // 10), response(2, surprise=1_000)
    assert found(index, submission("a", short, sure), "1") == []
    assert found(index, submission("b", short, sure), "2") == []
    # It is the first author's surprise that counts: a copier cannot talk a copy small.
    assert found(index, submission("a", response(3)), "3") == []
    assert found(index, submission("b", response(3, surprise=0)), "4") == [(0, "a")]


def test_one_response_sent_for_many_is_noticed() -> None:
    index = Index()
    assert found(index, submission("a", response(1), response(1), response(1)), "1") == [(1, "a"), (2, "a")]


def test_a_submission_that_is_looked_at_again_is_no_copy_of_itself() -> None:
    index = Index()
    made = submission("a", response(1), response(2))
    assert found(index, made, "1") == found(index, made, "1") == []


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    index = Index(capacity=100)
    for seed in range(20):
        index.take(submission("a", response(seed)), digest(f"entry {seed}"))
        assert len(index) <= 100
    assert found(index, submission("b", response(0)), "x") == []
    assert found(index, submission("b", response(19)), "y") == [(0, "a")]
