"""``farflung devnet``: a whole network on this machine."""

from __future__ import annotations

import argparse
from dataclasses import fields

import trio
from rich.console import Console

from node.cli import options
from node.cli.terminal import end_process
from node.config import CHEATS, ENGINES
from node.devnet import network
from node.devnet.live_display import open_display
from node.devnet.setup import Options, default_folder


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    parser = options.add_command(commands, "devnet", _devnet, help=phrase, data_dir=False)
    options.add_number(parser, "--nodes", default=5, help="honest nodes, at least 4 (default: 5)")
    options.add_number(parser, "--steps", default=60, help="training steps (default: 60)")
    options.add_folder(parser, "--dir", help="the run's folder, new or empty (default: devnet/<UTC time>)")
    parser.add_argument(
        "--cheat",
        dest="cheats",
        action="append",
        default=[],
        choices=[cheat for cheat in CHEATS if cheat],
        help="add one more node that only infers, and cheats so; may be given several times",
    )
    parser.add_argument(
        "--tasks",
        metavar="FILE|NAMES",
        help="a TOML file of tasks, or reasoning-gym data sets by name with commas (default: the starter model's own)",
    )
    options.add_file(
        parser,
        "--domain",
        help="a domain.toml to try out: its model, tasks, recipe, timings and thresholds instead of the starter's",
    )
    parser.add_argument(
        "--engine", choices=ENGINES, default="auto", help="what the nodes generate with (default: auto)"
    )
    options.add_number(parser, "--threads", default=1, help="threads of each child that computes (default: 1)")
    every = "evaluate every N-th version on held-out questions (default: none)"
    options.add_number(parser, "--eval-every", default=0, help=every)
    parser.add_argument(
        "--tensorboard", action="store_true", help="have every node write TensorBoard's event files as well"
    )
    seed = "derive the nodes' keys from N, so that another run has the same node ids"
    options.add_number(parser, "--seed", help=seed)
    parser.add_argument("--keep-running", action="store_true", help="go on after the summary, until Ctrl-C")


def _devnet(arguments: argparse.Namespace) -> int:
    """Start several nodes as separate processes, let them train the starter model together, and write report.html and
    summary.json into the run's folder. Exit code 0 when all nodes ended with the same log, 1 when they did not, 130
    after Ctrl-C."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Options) if field.name != "folder"}
    given["cheats"] = tuple(arguments.cheats)
    asked = Options(folder=(arguments.dir or default_folder()).absolute(), **given)
    end_process(trio.run(network.run, asked, lambda: open_display(Console())))
