"""Electors: quorums, cuts, reports, votes and grants."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.domain import parse_genesis
from protocol.errors import LocalError, PeerError
from protocol.log import entry
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import FROZEN, Head, heads_root
from protocol.log.quorum import (
    CertifiedCut,
    CertifiedGrant,
    Cut,
    Grant,
    PreparedCut,
    Report,
    certify,
    certify_grant,
    check_quorum,
    commit,
    faults,
    grant_vote,
    moves,
    prepare,
    quorum,
    verify_commit,
    verify_grant_vote,
    verify_vote,
    vote,
)
from protocol.records import StepBlob
from tests.protocol.builders import digest, key
from tests.protocol.strategies import heads, values
from tests.vectors import golden
from tests.vectors.make import golden_cut, golden_grant

NAMES = ("a", "b", "c", "d")
ELECTORS = tuple(sorted(key(name).node for name in NAMES))
DOMAIN = digest("domain")


def head(author: str, seq: int, branch: str = "", status: int = 0) -> Head:
    """The head of ``author`` at ``seq`` on a named branch."""
    name = f"{author}{branch} {seq}"
    return Head(digest(author), seq, digest(f"entry {name}"), digest(f"root {name}"), status)


def make_cut(*rows: Head, height: int = 1, prev: bytes = DOMAIN, root: bytes | None = None) -> Cut:
    """A cut with these rows, over nothing else."""
    return Cut.make(DOMAIN, height, prev, root or heads_root(rows), rows)


def votes_of(cut: Cut, *names: str, epoch: int = 1) -> dict[bytes, bytes]:
    """The votes of these electors."""
    return dict(vote(key(name), cut, epoch) for name in names)


def commits_of(cut: Cut, *names: str, epoch: int = 1) -> dict[bytes, bytes]:
    """The commits of these electors."""
    return dict(commit(key(name), cut, epoch) for name in names)


def test_the_sizes_of_quorums() -> None:
    assert [(n, faults(n), quorum(n)) for n in (1, 2, 3, 4, 5, 7, 10)] == [
        (1, 0, 1),
        (2, 0, 2),
        (3, 0, 2),
        (4, 1, 3),
        (5, 1, 4),
        (7, 2, 5),
        (10, 3, 7),
    ]


def test_two_quorums_share_an_honest_elector_and_honest_ones_suffice() -> None:
    for n in range(1, 65):
        assert 2 * quorum(n) - n > faults(n)
        assert quorum(n) <= n - faults(n)


@settings(max_examples=30)
@given(
    st.lists(heads, min_size=1, max_size=5, unique_by=lambda item: item.author),
    st.integers(1, 5),
    st.integers(0, 2**62),
)
def test_a_cut_reads_as_written(rows: list[Head], height: int, epoch: int) -> None:
    cut = make_cut(*rows, height=height, prev=DOMAIN if height == 1 else digest("prev"))
    assert Cut.parse(cut.body) == cut
    prepared = prepare(cut, epoch, votes_of(cut, "a", "b", "c", epoch=epoch), ELECTORS)
    assert PreparedCut.parse(prepared.encode()) == prepared
    certified = certify(cut, epoch, commits_of(cut, "a", "b", "c", epoch=epoch), ELECTORS)
    assert CertifiedCut.parse(certified.encode()) == certified


@pytest.mark.parametrize(
    ("height", "prev", "rows"),
    [(1, digest("prev"), [head("x", 1)]), (2, DOMAIN, [head("x", 1)]), (0, DOMAIN, [head("x", 1)]), (1, DOMAIN, [])],
)
def test_cuts_out_of_place_or_empty_are_not_made(height: int, prev: bytes, rows: list[Head]) -> None:
    with pytest.raises(LocalError):
        make_cut(*rows, height=height, prev=prev)


def test_rows_ascend_by_author() -> None:
    rows = sorted((head("x", 1), head("y", 1)), key=lambda row: row.author, reverse=True)
    values = [row.to_value() for row in rows]
    for wrong in (values, [values[0], values[0]]):
        with pytest.raises(PeerError, match="ascending"):
            Cut.parse(codec.encode([1, DOMAIN, 1, DOMAIN, bytes(32), wrong, []]))


def test_every_flipped_byte_of_a_certificate_is_rejected() -> None:
    cut = make_cut(head("x", 1))
    for made in (
        certify(cut, 1, commits_of(cut, "a", "b", "c"), ELECTORS),
        prepare(cut, 1, votes_of(cut, "a", "b", "c"), ELECTORS),
    ):
        raw = made.encode()
        for place in range(len(raw)):
            with pytest.raises(PeerError):
                type(made).parse(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :])


def test_a_certificate_is_made_of_a_quorum_of_electors() -> None:
    cut = make_cut(head("x", 1))
    for names in (("a", "b"), ("a", "b", "stranger")):
        with pytest.raises(LocalError):
            certify(cut, 1, commits_of(cut, *names), ELECTORS)
        with pytest.raises(LocalError):
            prepare(cut, 1, votes_of(cut, *names), ELECTORS)
        # It parses, and is no quorum.
        read = CertifiedCut.parse(codec.encode([cut.body, 1, sorted(commits_of(cut, *names).items())]))
        with pytest.raises(PeerError):
            check_quorum(read.votes, ELECTORS, "cut")
    check_quorum(certify(cut, 1, commits_of(cut, "a", "b", "c"), ELECTORS).votes, ELECTORS, "cut")
    one = sorted(commits_of(cut, "a").items())
    with pytest.raises(PeerError, match="ascending"):
        CertifiedCut.parse(codec.encode([cut.body, 1, one * 3]))
    with pytest.raises(PeerError, match="quorum"):
        check_quorum(CertifiedCut.parse(codec.encode([cut.body, 1, one])).votes, ELECTORS, "cut")


def test_commits_of_two_epochs_and_votes_certify_nothing() -> None:
    cut = make_cut(head("x", 1))
    mixed = commits_of(cut, "a", "b") | commits_of(cut, "c", epoch=2)
    for signatures in (mixed, votes_of(cut, "a", "b", "c")):
        with pytest.raises(PeerError, match="signature"):
            CertifiedCut.parse(codec.encode([cut.body, 1, sorted(signatures.items())]))
    with pytest.raises(PeerError, match="signature"):
        PreparedCut.parse(codec.encode([cut.body, 1, sorted(commits_of(cut, "a", "b", "c").items())]))


def test_a_vote_is_for_one_cut_in_one_epoch_and_one_round() -> None:
    cut, other = make_cut(head("x", 1)), make_cut(head("x", 2))
    elector, signature = vote(key("a"), cut, 3)
    verify_vote(cut, 3, elector, signature, ELECTORS)
    with pytest.raises(PeerError):
        verify_vote(other, 3, elector, signature, ELECTORS)
    with pytest.raises(PeerError):
        verify_vote(cut, 4, elector, signature, ELECTORS)
    with pytest.raises(PeerError):
        verify_commit(cut, 3, elector, signature, ELECTORS)
    verify_commit(cut, 3, *commit(key("a"), cut, 3), ELECTORS)
    with pytest.raises(PeerError):
        verify_vote(cut, 3, *vote(key("stranger"), cut, 3), ELECTORS)


@settings(max_examples=30)
@given(st.lists(heads, max_size=4, unique_by=lambda item: item.author), st.integers(0, 2**62))
def test_a_report_reads_as_written(rows: list[Head], epoch: int) -> None:
    rows = sorted(rows, key=lambda row: row.author)
    made = Report(DOMAIN, key("a").node, epoch, digest("cut"), tuple(rows), 3, 4)
    assert Report.parse(made.sign(key("a")), ELECTORS) == made


def test_only_electors_report_and_only_for_themselves() -> None:
    stranger = Report(DOMAIN, key("stranger").node, 1, DOMAIN, (), 0, 0)
    with pytest.raises(PeerError):
        Report.parse(stranger.sign(key("stranger")), ELECTORS)
    with pytest.raises(LocalError):
        stranger.sign(key("a"))
    raw = Report(DOMAIN, key("a").node, 1, DOMAIN, (head("x", 1),), 0, 0).sign(key("a"))
    for place in range(len(raw)):
        with pytest.raises(PeerError):
            Report.parse(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :], ELECTORS)


@pytest.mark.parametrize(
    ("old", "new", "may"),
    [
        (None, head("x", 0), True),
        (head("x", 1), head("x", 2), True),
        (head("x", 2), head("x", 2), False),
        (head("x", 2), head("x", 1), False),
        (head("x", 2), head("x", 2, status=FROZEN), True),
        (head("x", 2), head("x", 2, "'", FROZEN), False),
        (head("x", 2, status=FROZEN), head("x", 3), False),
        (head("x", 2, status=FROZEN), head("x", 2, status=FROZEN), False),
    ],
)
def test_how_rows_move(old: Head | None, new: Head, may: bool) -> None:
    assert moves(old, new) is may


def test_grants_read_as_written() -> None:
    for grant in (
        Grant.make(DOMAIN, 1, key("t").node, DOMAIN, 0, 0, DOMAIN),
        Grant.make(DOMAIN, 3, key("t").node, ELECTORS[0], 2, 9, digest("cut")),
    ):
        assert Grant.parse(grant.body) == grant
        certified = certify_grant(grant, dict(grant_vote(key(name), grant) for name in NAMES[1:]), ELECTORS)
        assert CertifiedGrant.parse(certified.encode()) == certified


@pytest.mark.parametrize(
    ("term", "base", "base_term", "base_number"),
    [(0, DOMAIN, 0, 0), (1, DOMAIN, 1, 0), (1, DOMAIN, 0, 1), (2, digest("w"), 2, 0), (2, digest("w"), 0, 0)],
)
def test_grants_on_a_wrong_base_are_not_made(term: int, base: bytes, base_term: int, base_number: int) -> None:
    with pytest.raises(LocalError):
        Grant.make(DOMAIN, term, key("t").node, base, base_term, base_number, DOMAIN)


def test_a_vote_for_a_cut_is_no_grant_and_every_flip_is_rejected() -> None:
    grant = Grant.make(DOMAIN, 1, key("t").node, DOMAIN, 0, 0, DOMAIN)
    verify_grant_vote(grant, *grant_vote(key("a"), grant), ELECTORS)
    with pytest.raises(PeerError):
        verify_grant_vote(grant, *vote(key("a"), make_cut(head("x", 1)), 1), ELECTORS)
    with pytest.raises(LocalError):
        certify_grant(grant, dict([grant_vote(key("a"), grant)]), ELECTORS)
    raw = certify_grant(grant, dict(grant_vote(key(name), grant) for name in NAMES[1:]), ELECTORS).encode()
    for place in range(len(raw)):
        with pytest.raises(PeerError):
            CertifiedGrant.parse(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :])


@settings(max_examples=25)
@given(values)
def test_any_value_is_refused_or_read(value: object) -> None:
    """Parsers never raise anything but PeerError, whatever canonical value they are given."""
    data = codec.encode(value)
    signed = codec.encode([data, bytes(64)])
    voted = codec.encode([data, 1, [[ELECTORS[0], bytes(64)], [ELECTORS[1], bytes(64)], [ELECTORS[2], bytes(64)]]])
    granted = codec.encode([data, [[ELECTORS[0], bytes(64)]]])
    parsers: list[Callable[[bytes], object]] = [
        Cut.parse,
        Grant.parse,
        ForkProof.parse,
        StepBlob.parse,
        parse_genesis,
        entry.decode,
        lambda raw: entry.parse(raw, bytes(64), verify=False),
        CertifiedCut.parse,
        PreparedCut.parse,
        CertifiedGrant.parse,
        lambda raw: Report.parse(raw, ELECTORS),
    ]
    for parse in parsers:
        for raw in (data, signed, voted, granted):
            with contextlib.suppress(PeerError):
                parse(raw)


def test_golden_cuts_and_grants() -> None:
    stored = golden("cut")
    assert golden_cut() == stored
    electors = [bytes.fromhex(elector) for elector in stored["electors"]]
    for case in stored["cuts"]:
        assert CertifiedCut.parse(bytes.fromhex(case["wire"])).cut.id.hex() == case["id"]
    assert Report.parse(bytes.fromhex(stored["report"]), electors).epoch == 2
    stored = golden("grant")
    assert golden_grant() == stored
    for case in stored["grants"]:
        assert CertifiedGrant.parse(bytes.fromhex(case["wire"])).grant.id.hex() == case["id"]
