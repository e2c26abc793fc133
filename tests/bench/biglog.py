"""Large logs for benchmarks, made as fast as their signatures allow: a training run in which nothing goes wrong.

Each version is generated with by every inference node, judged by the three validators that are due, and covered by one
cut. Signatures, hashes and certificates are real; the files they speak of are not.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Final

from node.log.log_opening import SNAPSHOT_ENTRIES
from node.store.log_rows import SCHEMA, SCHEMA_VERSION, Item, snapshot_hash
from node.store.log_store import stored
from protocol import codec, identity
from protocol.constants import FORMAT
from protocol.credit.ledger import Ledger
from protocol.credit.snapshot import Snapshot
from protocol.domain import Domain
from protocol.identity import Identity
from protocol.log.entry import NO_PREV, Entry
from protocol.log.quorum import CertifiedCut, Cut, certify, commit
from protocol.log.replica import Replica
from protocol.records import Join, Record, Role, Rollout, Step, Verdict, Weights
from protocol.work.schedule import due_validators
from tests.protocol.builders import MODEL, RECIPE, digest, grant_for, key, small_domain

GROUPS = RECIPE.groups_per_submission

INFERENCE: Final = 96
VALIDATORS: Final = 6
ELECTOR: Final = "elector"

DOMAIN: Final = small_domain()


class Feed:
    """One author's feed, signed without the checks that ``entry.make`` makes."""

    def __init__(self, author: Identity, domain: bytes) -> None:
        self.author = author
        self.domain = domain
        self.seq = 0
        self.prev = NO_PREV

    def say(self, anchor: bytes, payload: Record) -> Entry:
        """The next entry."""
        node, kind = self.author.node, payload.KIND
        body = codec.encode([FORMAT, self.domain, node, self.seq, self.prev, anchor, kind, payload.to_value()])
        signature = self.author.sign(identity.ENTRY, body)
        entry = Entry(self.domain, node, self.seq, self.prev, anchor, kind, payload, body, signature)
        self.seq, self.prev = self.seq + 1, entry.id
        return entry


class Run:
    """The run, as far as it is told: ``ledger`` holds it."""

    def __init__(self, domain: Domain = DOMAIN, inference: int = INFERENCE) -> None:
        self.domain = domain
        self.ledger = Ledger(Replica(domain))
        self.feeds = {name: Feed(key(name), domain.id) for name in (ELECTOR, "trainer")}
        self.validators = [Feed(key(f"validator {number}"), domain.id) for number in range(VALIDATORS)]
        self.inference = [Feed(key(f"inference {number}"), domain.id) for number in range(inference)]

    def items(self) -> Iterator[Item]:
        """The log, for ever; each item is taken by the replica before it is given."""
        replica, domain = self.ledger.replica, self.domain
        trainer = self.feeds["trainer"]
        nodes = [*self.feeds.values(), *self.validators, *self.inference]
        for feed in nodes:
            yield self._take(feed.say(domain.id, Join(sha256(feed.author.node).digest(), "farflung/bench", "node")))
        for feed in (*self.validators, *self.inference):
            role = "validator" if feed in self.validators else "inference"
            yield self._take(feed.say(domain.id, Role(role)))
        yield self._cut()
        grant = grant_for(domain, 1, trainer.author.node)
        assert replica.add_grant(grant)
        yield grant
        model = MODEL
        newest = trainer.say(
            replica.newest_cut_id,
            Weights(1, 0, None, model.manifest.hash, model.manifest.size, model.whole, 4096, None),
        )
        yield self._take(newest)
        by_node = {feed.author.node: feed for feed in self.validators}
        responses = GROUPS * RECIPE.group_size
        number = 0
        while True:
            for feed in self.inference:
                anchor = replica.newest_cut_id
                file = sha256(newest.id + feed.author.node).digest()
                rollout = feed.say(anchor, Rollout(newest.id, 0, GROUPS, responses, responses * 5, file, 1024, GROUPS))
                yield self._take(rollout)
                for node in due_validators(newest.id, feed.author.node, 0, by_node):
                    validator = by_node[node]
                    draw = validator.author.sign(identity.DRAW, file + rollout.id)
                    verdict = validator.say(anchor, Verdict(rollout.id, "accepted", "none", "ok", 0, draw, 2))
                    self.ledger.draws.note(verdict.id, True)
                    yield self._take(verdict)
            number += 1
            trained = responses * len(self.inference)
            step = trainer.say(
                replica.newest_cut_id,
                Step(1, number, newest.id, digest("blob"), 90, 500_000, 0, 0, 2, trained, 0, trained, 40, 9, 1, 1, 0),
            )
            yield self._take(step)
            whole = sha256(step.id).digest()
            newest = trainer.say(
                replica.newest_cut_id, Weights(1, number, newest.id, whole, 2000, whole, 4096, step.id)
            )
            yield self._take(newest)
            yield self._cut()

    def _take(self, entry: Entry) -> Entry:
        assert self.ledger.replica.add_entry(entry)
        return entry

    def _cut(self) -> CertifiedCut:
        replica = self.ledger.replica
        moved = replica.uncovered()
        height = len(replica.cuts) + 1
        root = replica._certified.root_with(moved)
        cut = Cut.make(self.domain.id, height, replica.newest_cut_id, root, moved)
        made = certify(cut, height, dict([commit(key(ELECTOR), cut, height)]), self.domain.electors)
        assert replica.add_cut(made)
        return made


def write(path: Path, count: int, *, run: Run | None = None, told: Callable[[int], None] = lambda entries: None) -> Run:
    """A database with a log of about ``count`` entries, as a node's own would be that ran all the while."""
    run = run or Run()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for step in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=OFF", *SCHEMA):
            connection.execute(step)
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("INSERT INTO meta VALUES ('domain', ?)", (run.domain.id,))
        connection.execute("BEGIN")
        entries = 0
        summed_up = False
        for position, item in enumerate(run.items(), 1):
            connection.execute(*stored(position, item))
            if isinstance(item, Entry):
                entries += 1
            elif isinstance(item, CertifiedCut):
                ledger = run.ledger
                ledger.update()
                if ledger.final_entries - ledger.summed_up >= SNAPSHOT_ENTRIES:
                    ledger.summed_up = ledger.final_entries
                    if not summed_up and entries >= count - SNAPSHOT_ENTRIES:
                        # The last one as far from the end as it can be.
                        summed_up = True
                        snapshot = Snapshot.take(ledger)
                        assert snapshot is not None
                        data = snapshot.encode()
                        digest_of = snapshot_hash(position, data)
                        connection.execute("INSERT INTO snapshot VALUES (1, ?, ?, ?)", (position, digest_of, data))
                    ledger.forget()
                    told(entries)
                if entries >= count:
                    break
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return run
