"""Small domains, feeds, cuts and grants for tests: everything deterministic, keys from short seeds."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from protocol import identity
from protocol.credit.ledger import Ledger
from protocol.credit.submission_life import PENDING, Decision
from protocol.domain import (
    Admission,
    Domain,
    Model,
    Policy,
    Recipe,
    Task,
    Thresholds,
    default_timings,
    make_genesis,
    parse_genesis,
)
from protocol.errors import Evidence
from protocol.identity import Identity
from protocol.log.admission import Ticket
from protocol.log.branches import Outcome
from protocol.log.budget import UNBOUNDED, Work
from protocol.log.entry import NO_PREV, Entry, make
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import RangeRequest, heads_root
from protocol.log.quorum import CertifiedCut, CertifiedGrant, Cut, Grant, certify, certify_grant, commit, grant_vote
from protocol.log.replica import Replica
from protocol.records import Blob, Join, Record, Role, Rollout, Step, Verdict, Weights

RECIPE = Recipe(
    async_level=2,
    group_size=4,
    groups_per_submission=2,
    groups_per_step=4,
    max_prompt_tokens=32,
    max_response_tokens=8,
    temperature=1_000_000,
    min_p=0,
    clip_low=200_000,
    clip_high=200_000,
    clip_max=4_000_000,
    importance_max=2_000_000,
    learning_rate=1_000_000_000,
    warmup_steps=0,
    weight_decay=0,
    grad_clip=1_000_000,
    entropy=0,
    kl=0,
    inner_steps=1,
    normalisation="token",
    target_lengths=(),
    length_penalty=0,
    budget_prompt="",
)
POLICY = Policy(
    min_nodes=2,
    relays_min=1,
    relays_per_million=0,
    validators_min=1,
    validators_per_million=0,
    validator_reputation=0,
    audit_share=1_000_000,
)
THRESHOLDS = Thresholds(
    deficit_clip=250_000,
    deficit_honest=1_000,
    deficit_mean=20_000,
    mismatch_share=50_000,
    activation_mismatch_share=300_000,
    mantissa_mean=10_000_000,
    mantissa_median=8_000_000,
    logprob_error=100_000,
)


def digest(text: str) -> bytes:
    """32 bytes that stand for the hash of something called ``text``."""
    return sha256(text.encode()).digest()


def key(name: str) -> Identity:
    """The identity whose seed is the digest of ``name``."""
    return Identity(digest(f"key {name}"))


MODEL = Model(
    architecture="llama",
    config=Blob(digest("config"), 400),
    tokenizer=Blob(digest("tokenizer"), 3000),
    manifest=Blob(digest("manifest 0"), 2000),
    whole=digest("whole 0"),
    compute_dtype="float32",
)


GENEROUS = Admission("open", 0, 32, 2**20)
"""No work is asked, and no budget is at issue."""

MEMBERS = (
    *(f"{letter}{number}" for letter in "eivw" for number in range(1, 10)),
    *("author", "another", "creator", "late", "lost", "new", "newcomer", "node", "old", "other", "peer", "second"),
    *("server", "stolen", "trainer", "validator", "relay", "inference", "alice", "bob", *"abcdefghijklmnopqrstuvwxyz"),
    *("observer", "stranger", "outsider", "cheat", "thief", "owner", "first", "node-1", "node-2", "node-10"),
)
"""Names of keys that the genesis of tests names, so that their owners need no admission."""


def small_genesis(
    electors: tuple[str, ...] = ("elector",),
    validators: tuple[str, ...] = (),
    policy: Policy = POLICY,
    name: str = "test",
    members: tuple[str, ...] = MEMBERS,
    **more: Any,
) -> bytes:
    """A signed genesis by the first elector; electors, validators and ``members`` are key names. ``more`` is handed to
    ``make_genesis``."""
    return make_genesis(
        key(electors[0]),
        name=name,
        devnet=True,
        electors=tuple(key(elector).node for elector in electors),
        validators=tuple(key(validator).node for validator in validators),
        trainers=tuple(key(member).node for member in members),
        **{"admission": GENEROUS, **more},
        model=MODEL,
        tasks=(Task("reasoning-gym", "basic_arithmetic", 1, '{"max_digits": 2}', "0.1.25", None),),
        recipe=RECIPE,
        timings=default_timings(True),
        policy=policy,
        thresholds=THRESHOLDS,
    )


def small_domain(
    electors: tuple[str, ...] = ("elector",),
    validators: tuple[str, ...] = (),
    policy: Policy = POLICY,
    members: tuple[str, ...] = MEMBERS,
    **more: Any,
) -> Domain:
    """The parsed ``small_genesis``."""
    return parse_genesis(small_genesis(electors, validators, policy, members=members, **more))


class Writer:
    """Signs one author's feed: ``append`` makes the next entry on ``anchor`` (the domain id at first)."""

    def __init__(self, name: str, domain: bytes, *, joined: bool = True) -> None:
        self.identity = key(name)
        self.node = self.identity.node
        self.domain = domain
        self.anchor = domain
        self.entries: list[Entry] = []
        if joined:
            self.append(Join(digest(f"recovery {name}"), "farflung/test", name[:32]))

    def append(self, payload: Record) -> Entry:
        """The next entry of the feed, signed."""
        prev = self.entries[-1].id if self.entries else NO_PREV
        entry = make(self.identity, self.domain, len(self.entries), prev, self.anchor, payload)
        self.entries.append(entry)
        return entry


def cut_for(
    replica: Replica,
    *electors: str,
    epoch: int | None = None,
    among: tuple[bytes, ...] | None = None,
    tickets: Sequence[Ticket] = (),
) -> CertifiedCut:
    """A certified cut over everything that ``replica`` holds and no cut covers; the electors are key names, by default
    of those in force."""
    among = among or replica.electors_at(len(replica.cuts) + 1)
    cut = Cut.make(
        replica.domain.id,
        len(replica.cuts) + 1,
        replica.newest_cut_id,
        heads_root({**replica.certified, **{head.author: head for head in replica.uncovered()}}.values()),
        replica.uncovered(),
        tickets,
    )
    if epoch is None:
        epoch = replica.cuts[-1].epoch + 1 if replica.cuts else 1
    return certify(cut, epoch, dict(commit(key(elector), cut, epoch) for elector in electors), among)


def grant_for(
    domain: Domain,
    term: int,
    trainer: bytes,
    base: Entry | None = None,
    electors: tuple[str, ...] = ("elector",),
    anchor: bytes | None = None,
) -> CertifiedGrant:
    """A certified grant of ``term`` to ``trainer`` on the weights entry ``base`` (None: before version 0), made when
    the cut ``anchor`` (None: the domain's id) was the newest."""
    anchor = anchor or domain.id
    if base is None:
        grant = Grant.make(domain.id, term, trainer, domain.id, 0, 0, anchor)
    else:
        assert isinstance(base.payload, Weights)
        grant = Grant.make(domain.id, term, trainer, base.id, base.payload.term, base.payload.number, anchor)
    votes = dict(grant_vote(key(elector), grant) for elector in electors)
    return certify_grant(grant, votes, tuple(votes))


class Story:
    """A network whose replica takes everything as it happens; ``objects`` keeps all of it for telling it again.

    Names are key names. The first cut covers the joins and roles; term 1 is granted to "trainer", and version 0
    anchors on that cut, so that everybody named may infer, audit and train.
    """

    def __init__(
        self,
        validators: tuple[str, ...] = ("v1",),
        inference: tuple[str, ...] = ("i1", "i2"),
        policy: Policy = POLICY,
        named: tuple[str, ...] = (),
        **more: Any,
    ) -> None:
        self.domain = small_domain(validators=named, policy=policy, **more)
        self.replica = Replica(self.domain)
        self.ledger = Ledger(self.replica)
        self.work: Work = UNBOUNDED
        self.objects: list[Entry | CertifiedCut | CertifiedGrant] = []
        self.writers: dict[str, Writer] = {}
        roles = {"trainer": "trainer"} | dict.fromkeys(validators, "validator") | dict.fromkeys(inference, "inference")
        for name, role in roles.items():
            self.join(name)
            self.say(name, Role(role))
        self.cut()
        self.grant(1, "trainer")
        self.newest = self.say("trainer", self.version(1, 0, None))

    def node(self, name: str) -> bytes:
        """The node id of a name."""
        return key(name).node

    def join(self, name: str) -> Entry:
        """A newcomer's first entry."""
        writer = self.writers[name] = Writer(name, self.domain.id, joined=False)
        writer.anchor = self.replica.newest_cut_id
        return self.say(name, Join(digest(f"recovery {name}"), "farflung/test", name))

    def say(self, name: str, payload: Record) -> Entry:
        """The next entry of a feed, taken by the replica."""
        entry = self.writers[name].append(payload)
        assert self.replica.add_entry(entry, self.work)
        self.objects.append(entry)
        return entry

    def admit(self, *names: str) -> CertifiedCut:
        """Certify everything, and admit these, who did no work."""
        return self.cut(*(Ticket(self.node(name), self.replica.newest_cut_id, 0) for name in names))

    def cut(self, *tickets: Ticket) -> CertifiedCut:
        """Certify everything, with these tickets; feeds anchor on it from here on."""
        cut = cut_for(self.replica, "elector", tickets=tickets)
        assert self.replica.add_cut(cut, self.work)
        self.objects.append(cut)
        for writer in self.writers.values():
            writer.anchor = cut.cut.id
        return cut

    def grant(self, term: int, trainer: str, base: Entry | None = None) -> CertifiedGrant:
        """Grant a term."""
        grant = grant_for(self.domain, term, self.node(trainer), base)
        assert self.replica.add_grant(grant)
        self.objects.append(grant)
        return grant

    def version(self, term: int, number: int, predecessor: bytes | None, step: bytes | None = None) -> Weights:
        """A version's payload; version 0 is the genesis'."""
        manifest = MODEL.manifest if number == 0 else Blob(digest(f"manifest {term} {number}"), 2000)
        whole = MODEL.whole if number == 0 else digest(f"whole {term} {number}")
        return Weights(term, number, predecessor, manifest.hash, manifest.size, whole, 4096, step)

    def train(self, name: str = "trainer", term: int = 1, base: Entry | None = None, trained: int = 8) -> Entry:
        """A step and the weights that it makes, on the newest ones."""
        base = base or self.newest
        assert isinstance(base.payload, Weights)
        number = base.payload.number + 1
        step = Step(term, number, base.id, digest("blob"), 90, 500_000, 0, 0, 2, trained, 0, trained, 40, 9, 1, 1, 0)
        made = self.say(name, step)
        self.newest = self.say(name, self.version(term, number, base.id, made.id))
        return self.newest

    def rollout(self, name: str, first_counter: int = 0, weights: Entry | None = None, groups: int = 2) -> Entry:
        """Announce a submission of the newest version."""
        version = (weights or self.newest).id
        responses = groups * RECIPE.group_size
        file = digest(f"file {name} {version.hex()} {first_counter}")
        return self.say(name, Rollout(version, first_counter, groups, responses, responses * 5, file, 1024, groups))

    def judge(self, name: str, rollout: Entry, outcome: str = "accepted", reason: str = "", audited: int = 2) -> Entry:
        """A verdict: "accepted", "soft", "hard" or "void"."""
        return self.say(name, self.verdict(name, rollout, outcome, reason, audited))

    def verdict(self, name: str, rollout: Entry, outcome: str, reason: str = "", audited: int = 2) -> Verdict:
        """The payload of a verdict, its draw signed."""
        assert isinstance(rollout.payload, Rollout)
        result, severity, usual = {
            "accepted": ("accepted", "none", "ok"),
            "soft": ("rejected", "soft", "late"),
            "hard": ("rejected", "hard", "sampling"),
            "void": ("void", "soft", "undecidable"),
        }[outcome]
        draw = key(name).sign(identity.DRAW, rollout.payload.submission + rollout.id)
        return Verdict(rollout.id, result, severity, reason or usual, 0, draw, audited)


def feed_all(replica: Replica, objects: Sequence[Entry | CertifiedCut | CertifiedGrant | ForkProof]) -> list[Outcome]:
    """Hand everything to the replica, again and again until nothing more is taken; returns what stayed missing."""
    waiting = list(objects)
    while True:
        left: list[tuple[Entry | CertifiedCut | CertifiedGrant | ForkProof, Outcome]] = []
        for thing in waiting:
            try:
                outcome = take(replica, thing)
            except Evidence:
                continue
            if outcome not in (Outcome.ADDED, Outcome.KNOWN, Outcome.FROZEN):
                left.append((thing, outcome))
        if len(left) == len(waiting):
            return [outcome for _, outcome in left]
        waiting = [thing for thing, _ in left]


def take(replica: Replica, thing: Entry | CertifiedCut | CertifiedGrant | ForkProof) -> Outcome:
    """Hand one object to the replica."""
    match thing:
        case Entry():
            return replica.add_entry(thing)
        case CertifiedCut():
            return replica.add_cut(thing)
        case CertifiedGrant():
            return replica.add_grant(thing)
        case _:
            return replica.add_fork(thing)


def status_of(ledger: Ledger, rollout: bytes, *, final: bool = False) -> Decision:
    """What was decided about the submission that this entry announces; "pending" for one that is not kept."""
    submission = ledger.fold(final).submissions.get(rollout)
    return PENDING if submission is None else submission.status


def missing_for(replica: Replica, cut: Cut) -> list[RangeRequest]:
    """What to ask for so that ``cut`` can be taken."""
    return [wanted for head in cut.changes if (wanted := replica.missing_for_head(head)) is not None]
