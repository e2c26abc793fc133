"""How soon each forger is caught, and how often an honest node would be: ``python -m tests.bench.forgers [--json]``.

Judges the rows that ``tests.bench.gather`` keeps (made here first, as many as asked for, unless ``--rows`` names files
of them). For each forger: submissions until the first hard rejection, when all its submissions are replayed in full,
one after the other. For honest nodes: the submissions that were run and how many of them were not accepted, with the
upper 95 % bound of that rate; and the same for submissions *resampled* from their groups, which shows rarer
coincidences of groups that were seen, and no groups that were not.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from node.workers import forger_zoo
from proofs import limits as fitting
from proofs.checks import FLOAT32_THRESHOLDS
from protocol.constants import MILLION
from protocol.domain import Thresholds
from tests.bench.gather import Bench, gather, subject

RESAMPLED: Final = 30_000
"""Submissions drawn from the honest groups: bounds a rate at 10⁻⁴."""


def load(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of some files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def reason_of(row: dict[str, Any], limits: Thresholds) -> str:
    """What an audit in full says of one submission by itself."""
    if row["static"] in ("bounds", "wrong-prompt", "termination"):
        return str(row["static"])
    (found,) = fitting.run([row["groups"]], limits).reasons
    return str(row["static"]) if found == "ok" else found


def judged(rows: Sequence[dict[str, Any]], limits: Thresholds) -> dict[str, Any]:
    """What becomes of one forger's submissions, in order."""
    reasons: list[str] = []
    for count, row in enumerate(rows, 1):
        found = reason_of(row, limits)
        if found in ("ok", "borderline"):
            chain = fitting.run([past["groups"] for past in rows[:count]], limits)
            found = chain.reasons[-1] if len(chain.reasons) == count else found
        reasons.append(found)
        if found not in ("ok", "borderline"):
            break
    hard = bool(reasons) and reasons[-1] not in ("ok", "borderline")
    tokens = sum(group[0] for row in rows[: len(reasons)] for group in row["groups"])
    return {
        "submissions_until_caught": len(reasons) if hard else None,
        "reason": reasons[-1] if hard else None,
        "accepted_before": reasons.count("ok"),
        "submissions": len(rows),
        "tokens": tokens,
        "caught_alone": sum(reason_of(row, limits) not in ("ok", "borderline") for row in rows),
    }


def honest(rows: Sequence[dict[str, Any]], limits: Thresholds, resampled: int) -> dict[str, Any]:
    """The false positives among honest submissions, and among ones resampled from their groups."""
    reasons = [reason_of(row, limits) for row in rows]
    wrong = [reason for reason in reasons if reason != "ok"]
    generator = random.Random(1)
    groups = [group for row in rows for group in row["groups"]]
    size = len(rows[0]["groups"])
    resampled *= size > 1  # of one group each, nothing new comes about
    made = ([generator.choice(groups) for _ in range(size)] for _ in range(resampled))
    again = sum(fitting.run([one], limits).reasons[-1] != "ok" for one in made)
    chain = fitting.run([row["groups"] for row in rows], limits)
    by_engine: dict[str, int] = {}
    for row in rows:
        by_engine[row["engine"]] = by_engine.get(row["engine"], 0) + 1
    return {
        "honest_submissions": len(rows),
        "honest_by_engine": by_engine,
        "honest_tokens": sum(group[0] for row in rows for group in row["groups"]),
        "false_positives": len(wrong),
        "false_positive_rate": len(wrong) / len(rows),
        "false_positive_rate_upper": fitting.upper_bound(len(wrong), len(rows)),
        "convicted_in_a_row": chain.until is not None,
        "resampled_submissions": resampled,
        "resampled_false_positives": again,
        "resampled_false_positive_rate_upper": fitting.upper_bound(again, resampled),
    }


def limits_for(rows: Sequence[dict[str, Any]], dtype: str) -> tuple[Thresholds, str]:
    """The float32 limits that a domain starts from; else those of a calibration, told as such."""
    if dtype == "float32":
        return FLOAT32_THRESHOLDS, "the defaults for float32"
    honest_rows = [row for row in rows if row["kind"] == "honest"]
    forged = [row for row in rows if row["kind"] != "honest"]
    return calibrated([*honest_rows[::2], *forged]), "calibrated on every second honest submission, judged on all"


def calibrated(rows: Sequence[dict[str, Any]]) -> Thresholds:
    """The limits that these rows ask for."""
    honest_rows: dict[str, list[Any]] = {}
    forged: dict[str, list[Any]] = {}
    for row in rows:
        part = honest_rows if row["kind"] == "honest" else forged
        part.setdefault(row["engine"] if row["kind"] == "honest" else row["kind"], []).extend(row["groups"])
    return fitting.thresholds(honest_rows, {name: part for name, part in forged.items() if part})


def result(rows: Sequence[dict[str, Any]], dtype: str, resampled: int = RESAMPLED) -> dict[str, Any]:
    """All figures of one subject."""
    limits, origin = limits_for(rows, dtype)
    found = {
        forger.name: judged(mine, limits)
        for forger in forger_zoo.ZOO
        if (mine := [row for row in rows if row["kind"] == forger.name])
    }
    return {
        "dtype": dtype,
        "limits": dict(zip((name for name, _ in Thresholds.SCHEMA), limits.to_value(), strict=True)),
        "limits_from": origin,
        "forgers": found,
        **honest([row for row in rows if row["kind"] == "honest"], limits, resampled),
    }


def table(found: dict[str, Any]) -> str:
    """The Markdown table of docs/ATTACKS.md."""
    lines = ["| forger | saves | caught after | for | caught by one audit |", "|---|---|---|---|---|"]
    saves = {forger.name: forger.saves for forger in forger_zoo.ZOO}
    for name, row in found["forgers"].items():
        until = row["submissions_until_caught"]
        after = f"**not within {row['submissions']}**" if until is None else str(until)
        lines.append(
            f"| {name} | {saves[name]} | {after} | {row['reason'] or '–'} "
            f"| {row['caught_alone']} of {row['submissions']} |"
        )
    told = ", ".join(f"{name} {value / MILLION:g}" for name, value in found["limits"].items())
    engines = ", ".join(f"{count} {name}" for name, count in found["honest_by_engine"].items())
    lines += [
        "",
        f"Honest: {found['honest_submissions']} submissions ({engines}; {found['honest_tokens']} tokens), "
        f"{found['false_positives']} not accepted: a rate of at most {found['false_positive_rate_upper']:.1e} (95 %).",
        *(
            [
                f"Resampled from their groups: {found['resampled_false_positives']} of "
                f"{found['resampled_submissions']}, at most {found['resampled_false_positive_rate_upper']:.1e}."
            ]
            if found["resampled_submissions"]
            else []
        ),
        f"Limits: {found['limits_from']} ({told}).",
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--subject", default="starter", help="starter, smollm2-float32 or smollm2-bfloat16")
    parser.add_argument("--model", type=Path, metavar="DIR", help="SmolLM2's folder (tests/smollm2.py makes it)")
    parser.add_argument("--rows", type=Path, action="append", default=[], metavar="FILE", help="judge these rows")
    parser.add_argument("--honest", type=int, default=3_000)
    parser.add_argument("--forged", type=int, default=20)
    arguments = parser.parse_args()
    rows = load(arguments.rows)
    if not rows:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory():
            about = subject(arguments.subject, arguments.model)
            rows = list(gather(Bench(about), arguments.honest, arguments.forged, (), {}))
    found = result(rows, "bfloat16" if arguments.subject.endswith("bfloat16") else "float32")
    print(json.dumps(found) if arguments.json else table(found))


if __name__ == "__main__":
    main()
