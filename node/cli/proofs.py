"""``farflung proofs``: replay a verdict, and calibrate the limits of a new domain's model."""

from __future__ import annotations

import argparse
from dataclasses import fields

import trio

from node.api.reason_words import words
from node.cli import options, tables
from node.cli.options import Values
from node.evaluation import limit_calibration, verdict_replay
from node.evaluation.verdict_replay import Replayed
from protocol.records import Rollout, Verdict


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    actions = options.add_group(
        commands,
        "proofs",
        help=phrase,
        description="What shows that a submission came from the weights it names (docs/ATTACKS.md).",
    )
    replay = options.add_command(actions, "replay", _replay, help="judge again what a validator judged", json=True)
    replay.add_argument("verdict", metavar="VERDICT", help="the verdict entry's id, or its first 8 or more digits")
    replay.add_argument("--all", action="store_true", help="replay all groups, not only those that the draw picks")
    calibrate = options.add_command(
        actions, "calibrate", _calibrate, help="measure what limits a model needs", data_dir=False, json=True
    )
    options.add_folder(calibrate, "model", metavar="MODEL", help="a Hugging Face folder")
    options.add_folder(calibrate, "-o", "--out", required=True, metavar="OUT", help="a new folder")
    calibrate.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="what nodes compute in")
    for name, default, what in (
        ("--groups", 64, "honest groups of each engine"),
        ("--forged", 8, "groups of each forger"),
        ("--group-size", 8, "responses of a group"),
        ("--tokens", 64, "longest response"),
        ("--threads", 1, "processor threads"),
    ):
        options.add_number(calibrate, name, default=default, help=f"{what} ({default})")
    calibrate.add_argument(
        "--learning-rate", type=float, default=1e-6, metavar="RATE", help="of the steps that stale weights lack (1e-6)"
    )
    options.add_file(calibrate, "--prompts", help="a text file with a prompt on each line")


def _replay(arguments: argparse.Namespace) -> int:
    """Replay a verdict with the validator's own draw: check its signature, replay the groups that it picks, and
    compare. Needs the log, the submission's file and the version, as validators and the trainer hold them. Works beside
    a running daemon. Exit code 0 where the verdict comes out again, 1 where it does not."""
    directory = options.existing_directory(arguments)
    found: Replayed = trio.run(lambda: verdict_replay.replay(directory, arguments.verdict, everything=arguments.all))
    values = _values(found)
    title = "the verdict holds" if found.confirmed else "the verdict is not confirmed"
    options.show(arguments, values, lambda: tables.facts(_lines(values), title=title))
    return 0 if found.confirmed else 1


def _values(found: Replayed) -> Values:
    verdict, rollout = found.verdict.payload, found.rollout.payload
    assert isinstance(verdict, Verdict)
    assert isinstance(rollout, Rollout)
    result = found.result
    return {
        "confirmed": found.confirmed,
        "verdict": found.verdict.id.hex(),
        "validator": found.verdict.author.hex(),
        "author": found.rollout.author.hex(),
        "rollout": found.rollout.id.hex(),
        "said": {**_judgement(verdict), "words": words(verdict.reason)},
        "draw_holds": found.draw_holds,
        "share": found.share / 1e6,
        "drawn": list(found.drawn),
        "groups": found.groups,
        "replayed": result and {**_judgement(result), "words": result.words, "all_groups": found.whole},
        "note": found.note,
    }


def _judgement(judged: object) -> Values:
    return {name: getattr(judged, name) for name in ("outcome", "severity", "reason", "score", "audited")}


def _lines(values: Values) -> list[tuple[str, str]]:
    said, replayed = values["said"], values["replayed"]
    drawn = ", ".join(map(str, values["drawn"]))
    lines = [
        ("verdict", values["verdict"]),
        ("by", values["validator"]),
        ("about", f"submission {values['rollout']} of {values['author']}"),
        ("said", f"{said['words']} ({said['outcome']}, {said['reason']}; score {said['score']})"),
        (
            "draw",
            "its author's signature over the submission" if values["draw_holds"] else "not its author's signature",
        ),
        ("drawn", f"group {drawn} of 0 to {values['groups'] - 1}: a share of {values['share']:g} was to be replayed"),
    ]
    if replayed is not None:
        what = "all groups" if replayed["all_groups"] else "the drawn groups"
        found = f"{replayed['outcome']}, {replayed['reason']}; score {replayed['score']}"
        lines.append(("replayed", f"{what}: {replayed['words']} ({found})"))
    if values["note"]:
        lines.append(("mind", values["note"]))
    return lines


def _calibrate(arguments: argparse.Namespace) -> int:
    """Generate with a model as honest nodes do (with every engine that is installed) and as forgers do, and write into
    the folder OUT: thresholds.toml, a [thresholds] section for a domain.toml; calibration.json, all figures;
    report.html, with a ROC curve for each statistic and forger."""
    wanted = limit_calibration.CalibrationWanted(
        **{field.name: getattr(arguments, field.name) for field in fields(limit_calibration.CalibrationWanted)}
    )
    found = trio.run(lambda: limit_calibration.calibrate(wanted, arguments.out, options.note))

    def for_people() -> None:
        tables.table(
            ("forger", "groups", "caught at once", "submissions until caught", "by"),
            [
                (row["name"], row["groups"], f"{row['caught']}/{row['groups']}", row["until"] or "never", row["by"])
                for row in found["forgers"]
            ],
        )
        print(f"{arguments.out / 'thresholds.toml'} is for a domain.toml, {arguments.out / 'report.html'} for people")

    options.show(arguments, found, for_people)
    return 0
