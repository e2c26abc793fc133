"""Write the golden files of entry, cut, grant, genesis and evidence: ``python -m tests.vectors.make``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol import identity
from protocol.credit.sequential_test import FLOOR, NEWCOMER, gain, log_ratio
from protocol.log import recovery
from protocol.log.amendment import Amendment
from protocol.log.fork_proof import ForkProof
from protocol.log.quorum import Report
from protocol.log.replica import Replica
from protocol.records import Leave, Record, Role, Rollout, Step, StepBlob, Verdict, Weights
from tests.protocol.builders import THRESHOLDS, Writer, cut_for, digest, grant_for, key, small_domain, small_genesis

ELECTORS = ("elector", "elector 2", "elector 3", "elector 4")


def golden_genesis() -> Any:
    """A genesis with one elector."""
    domain = small_domain()
    return {"wire": small_genesis().hex(), "id": domain.id.hex(), "creator_seed": key("elector").seed.hex()}


def golden_entry() -> Any:
    """A feed with an entry of each kind, a fork proof, and the blob of a step."""
    domain = small_domain()
    writer = Writer("author", domain.id)
    author = writer.identity
    submission = digest("submission")
    draw = author.sign(identity.DRAW, submission + digest("rollout"))
    payloads: tuple[Record, ...] = (
        Role("trainer"),
        Weights(1, 0, None, digest("manifest 0"), 2000, digest("whole 0"), 4096, None),
        Weights(1, 1, writer.entries[0].id, digest("manifest 1"), 2000, digest("whole 1"), 4096, digest("step")),
        Weights(1, 2, digest("v1"), digest("m 2"), 2000, digest("w 2"), 4096, digest("step 2"), digest("delta"), 300),
        Rollout(digest("weights"), 0, 2, 8, 48, submission, 2048, 1),
        Verdict(digest("rollout"), "accepted", "none", "ok", 12_345, draw, 2),
        Verdict(digest("rollout"), "rejected", "hard", "sampling", 0, draw, 2),
        Step(1, 1, digest("weights"), digest("blob"), 100, 437_500, 250_000, 1, 4, 16, 8, 12, 96, 1400, 20, 3, 1),
        Leave(),
        recovery.close(key("recovery stolen"), domain.id, key("stolen").node, author.node),
        recovery.rebind(key("recovery lost"), domain.id, key("lost").node, author.node),
    )
    amendment = Amendment.make(domain.id, 1, [key(name).node for name in ELECTORS], THRESHOLDS)
    for payload in (*payloads, amendment.payload({domain.electors[0]: amendment.sign(key("elector"))})):
        writer.append(payload)
    other = Writer("author", domain.id)
    other.append(Leave())
    blob = StepBlob(((digest("rollout"), (digest("verdict"),)), (digest("rollout 2"), ())))
    return {
        "author_seed": author.seed.hex(),
        "entries": [
            {"kind": entry.kind, "wire": entry.encode().hex(), "id": entry.id.hex()} for entry in writer.entries
        ],
        "fork_proof": ForkProof.of(writer.entries[1], other.entries[1]).encode().hex(),
        "step_blob": blob.encode().hex(),
    }


def golden_cut() -> Any:
    """Two cuts by three of four electors, and a head report."""
    domain = small_domain(ELECTORS)
    replica = Replica(domain)
    one, two = Writer("author", domain.id), Writer("another", domain.id)
    for entry in one.entries + two.entries:
        replica.add_entry(entry)
    first = cut_for(replica, *ELECTORS[:3])
    replica.add_cut(first)
    one.anchor = first.cut.id
    replica.add_entry(one.append(Role("relay")))
    report = Report(domain.id, key("elector").node, 2, first.cut.id, tuple(replica.uncovered()), 1, 0)
    second = cut_for(replica, *ELECTORS[1:])
    return {
        "electors": [elector.hex() for elector in domain.electors],
        "cuts": [{"wire": cut.encode().hex(), "id": cut.cut.id.hex()} for cut in (first, second)],
        "report": report.sign(key("elector")).hex(),
    }


def golden_grant() -> Any:
    """Grants of two terms by three of four electors."""
    domain = small_domain(ELECTORS)
    trainer = Writer("trainer", domain.id)
    base = trainer.append(Weights(1, 0, None, digest("manifest 0"), 2000, digest("whole 0"), 4096, None))
    grants = (
        grant_for(domain, 1, trainer.node, None, ELECTORS[:3]),
        grant_for(domain, 2, key("author").node, base, ELECTORS[:3]),
    )
    return {
        "electors": [elector.hex() for elector in domain.electors],
        "grants": [{"wire": grant.encode().hex(), "id": grant.grant.id.hex()} for grant in grants],
    }


def golden_evidence() -> Any:
    """Logarithms, and the evidence of submissions in a row."""
    ratios = [[1, 1], [2, 1], [3, 2], [1_000, 50], [20_000, 1_000], [999_999, 7], [1_000_000, 1]]
    submissions = [[0, 400, 0], [30_000, 400, 0], [250_000, 40, 1], [9_000, 435, 0], [60_000, 435, 1], [0, 435, 0]]
    standing, rows = NEWCOMER, []
    for score, tokens, borderline in submissions:
        found = gain(score * tokens, tokens, THRESHOLDS.deficit_honest, THRESHOLDS.deficit_mean)
        standing = standing.after(found, bool(borderline))
        # From the floor, for integers of canonical msgpack are not negative.
        after = [standing.deficits - FLOOR, standing.borders - FLOOR]
        rows.append({"score": score, "tokens": tokens, "borderline": borderline, "above_floor": after})
    return {
        "logarithms": [{"ratio": ratio, "micro": log_ratio(*ratio)} for ratio in ratios],
        "deficit_honest": THRESHOLDS.deficit_honest,
        "deficit_mean": THRESHOLDS.deficit_mean,
        "submissions": rows,
    }


def main() -> None:
    """Write all files."""
    made = {
        "entry": golden_entry(),
        "cut": golden_cut(),
        "grant": golden_grant(),
        "genesis": golden_genesis(),
        "evidence": golden_evidence(),
    }
    for name, value in made.items():
        path = Path(__file__).parent / f"{name}.json"
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
