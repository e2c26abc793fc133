"""Small domains, feeds, cuts and grants for tests: everything deterministic, keys from short seeds."""

from __future__ import annotations

from hashlib import sha256

from protocol.domain import (
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
from protocol.entry import NO_PREV, Entry, make
from protocol.heads import heads_root
from protocol.identity import Identity
from protocol.quorum import CertifiedCut, CertifiedGrant, Cut, Grant, certify, certify_grant, grant_vote, vote
from protocol.records import Blob, Join, Record, Weights
from protocol.replica import Replica

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


def small_genesis(
    electors: tuple[str, ...] = ("elector",),
    validators: tuple[str, ...] = (),
    policy: Policy = POLICY,
    name: str = "test",
) -> bytes:
    """A signed genesis by the first elector; electors and validators are key names."""
    return make_genesis(
        key(electors[0]),
        name=name,
        devnet=True,
        electors=tuple(key(elector).node for elector in electors),
        validators=tuple(key(validator).node for validator in validators),
        model=MODEL,
        tasks=(Task("reasoning-gym", "basic_arithmetic", 1, '{"max_digits": 2}', "0.1.25", None),),
        recipe=RECIPE,
        timings=default_timings(True),
        policy=policy,
        thresholds=THRESHOLDS,
    )


def small_domain(
    electors: tuple[str, ...] = ("elector",), validators: tuple[str, ...] = (), policy: Policy = POLICY
) -> Domain:
    """The parsed ``small_genesis``."""
    return parse_genesis(small_genesis(electors, validators, policy))


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


def cut_for(replica: Replica, *electors: str, epoch: int | None = None) -> CertifiedCut:
    """A certified cut over everything that ``replica`` holds and no cut covers; the electors are key names."""
    cut = Cut.make(
        replica.domain.id,
        len(replica.cuts) + 1,
        (replica.cuts[-1].cut.epoch + 1 if replica.cuts else 1) if epoch is None else epoch,
        replica.newest_cut_id,
        heads_root({**replica.certified, **{head.author: head for head in replica.uncovered()}}.values()),
        replica.uncovered(),
    )
    return certify(cut, dict(vote(key(elector), cut) for elector in electors), replica.domain.electors)


def grant_for(
    domain: Domain, term: int, trainer: bytes, base: Entry | None = None, electors: tuple[str, ...] = ("elector",)
) -> CertifiedGrant:
    """A certified grant of ``term`` to ``trainer`` on the weights entry ``base`` (None: before version 0)."""
    if base is None:
        grant = Grant.make(domain.id, term, trainer, domain.id, 0, 0)
    else:
        assert isinstance(base.payload, Weights)
        grant = Grant.make(domain.id, term, trainer, base.id, base.payload.term, base.payload.number)
    return certify_grant(grant, dict(grant_vote(key(elector), grant) for elector in electors), domain.electors)
