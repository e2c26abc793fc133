"""``farflung completion``: what a shell needs to complete farflung's commands and options."""

from __future__ import annotations

import argparse
import sys

import shtab

from node.cli import options

SHELLS = ("bash", "zsh")


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    parser = options.add_command(commands, "completion", _completion, help=phrase, data_dir=False)
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def _completion(arguments: argparse.Namespace) -> int:
    """Print a completion script. bash: put it into ~/.local/share/bash-completion/completions/farflung. zsh: put it as
    _farflung into a folder of $fpath."""
    sys.stdout.write(shtab.complete(arguments.whole_parser(), arguments.shell))
    return 0
