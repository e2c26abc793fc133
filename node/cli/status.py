"""``farflung status``: what a node does, whether it is well, and what it waits for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from node.cli import options, tables
from node.cli.options import Values
from node.store.data_directory import DataDirectory
from protocol.identity import peer_id


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    options.add_command(commands, "status", _status, help=phrase, json=True)


def _status(arguments: argparse.Namespace) -> int:
    """Show the node's role and why it has it, the version it holds, what it waits for, its peers, credit and troubles.
    Exit code 0 where all is well, 1 where it does not run or something is not in order."""
    from node.api.control_client import Unavailable
    from node.cli.node_reading import ask, lock_holder

    directory = options.existing_directory(arguments)
    try:
        status = {"running": True, "data_dir": str(directory.path), **ask(directory, "status")}
    except Unavailable as error:
        holder = lock_holder(directory)
        why = "no daemon runs" if holder is None else f"process {holder} holds the folder, but: {error}"
        status = {**_away(directory, why), "pid": holder}
    troubles = [*status["health"], *status["problems"]]
    options.show(arguments, status, lambda: _show(status, troubles))
    return 1 if troubles else 0


def _show(status: Values, troubles: list[str]) -> None:
    if not status["running"]:
        tables.facts(_away_lines(status), title=f"{status['data_dir']}: the node does not run")
        return
    title = f"{status['name']}: {status['role']}, {'not all' if troubles else 'all'} is well"
    yellow = dict.fromkeys(("trouble", "last rejection", "earned nothing"), "yellow")
    tables.facts(_lines(status, troubles), title=title, styles={"role": tables.role_style(status["role"]), **yellow})


def _away(directory: DataDirectory, why: str) -> Values:
    """What can be said of a node that does not answer."""
    from node.domain import joining

    domain = joining.held(directory) if directory.genesis_file.exists() else None
    node = directory.read_identity().node if directory.exists() else None
    return {
        "running": False,
        "data_dir": str(directory.path),
        "node": None if node is None else node.hex(),
        "peer_id": None if node is None else peer_id(node),
        "domain": None if domain is None else domain.id.hex(),
        "domain_name": None if domain is None else domain.name,
        "disk_free": directory.free_bytes(),
        "health": [],
        "problems": [why],
    }


def _away_lines(status: Values) -> Iterator[tuple[str, str]]:
    yield "node", status["peer_id"] or "it has no key yet"
    yield "domain", f"{status['domain_name']} {status['domain']}" if status["domain"] else "none yet: farflung join"
    yield "disk", f"{status['disk_free'] / 1e9:.1f} GB free"
    yield "trouble", status["problems"][0]
    if status["pid"] is not None:  # it starts, or it hangs
        yield "to do", "wait a moment; if that does not help, stop it and start it again"
        return
    yield "to do", f"farflung run --data-dir {status['data_dir']}" if status["domain"] else "farflung join ADDRESS"


def _lines(status: Values, troubles: list[str]) -> Iterator[tuple[str, str]]:
    yield "role", f"{status['role']}: {status['why']}"
    held, newest = status["version"], status["newest_version"]
    yield "version", _version(held, newest)
    for number, waits in enumerate(status["waits_for"]):
        yield "waits for" if number == 0 else "", waits
    if status["steps"]:
        last = status["steps"][-1]
        yield "training", f"step {last['step']}, reward {last['reward']:.3f}"
        spent = (("trained", "train"), ("waited for rollouts", "wait"), ("and for its last version", "blocked"))
        times = ", ".join(f"{words} {last[f'{name}_ms'] / 1000:.1f} s" for words, name in spent)
        yield "", f"the trainer {times}; publishing took {last['publish_ms'] / 1000:.1f} s beside it"
    if status["evaluations"] and status["evaluations"][-1]["scores"]:
        evaluation = status["evaluations"][-1]
        score = evaluation["scores"][-1]
        rate = f"{score['pass_rate']:.3f} ({score['pass_rate_low']:.3f} to {score['pass_rate_high']:.3f})"
        yield "evaluation", f"version {evaluation['version']} passes {rate} of the held-out questions"
    yield "peers", f"{status['peers']}: {status['outbound']} dialled by it, {status['inbound']} dialled it"
    yield "reachability", _reachability(status)
    for number, address in enumerate(status["addresses"]):
        yield "addresses" if number == 0 else "", address
    yield "weights at", ", ".join(status["bulk"]["addresses"]) or "nowhere at the moment: they travel over libp2p"
    yield "disk", f"{status['disk_free'] / 1e9:.1f} GB free"
    account = status["account"]
    if account is not None:
        yield "credit", str(account["credit"])
        counts = (f"{account[name]} {name}" for name in ("accepted", "rejected", "void", "pending"))
        yield "submissions", f"{', '.join(counts)}; reputation {account['reputation'] / 1e6:.3f}"
    if status["why_nothing"] is not None:
        yield "earned nothing", status["why_nothing"]
    for number, row in enumerate(status["unpaid"]):
        line = f"{row['count']} × {row['words']} ({row['reason']}, {row['severity']})"
        yield "earned nothing" if number == 0 else "", f"{line}: {row['remedy']}" if row["remedy"] else line
    rejection = status["last_rejection"]
    if rejection is not None:
        yield "last rejection", f"{rejection['words']} ({rejection['outcome']}: {rejection['reason']})"
    final = "all final" if status["own_final"] else "not all final yet"
    yield "log", f"cut {status['cut_height']}; {status['own_entries']} own entries, {final}"
    yield "domain", f"{status['domain_name']} {status['domain']}"
    yield "node", status["peer_id"]
    for trouble in troubles:
        yield "trouble", trouble


def _version(held: int, newest: int) -> str:
    if newest < 0:
        return "none is published yet"
    if held < 0:
        return f"none yet; the newest is {newest}"
    return f"{held}, the newest" if held == newest else f"{held}; the newest is {newest}"


def _reachability(status: Values) -> str:
    if status["inbound"]:
        return f"others reach it: {status['inbound']} of its peers dialled it"
    return "not seen yet: it dialled all its peers. If that stays so, a firewall keeps others out; the node works"
