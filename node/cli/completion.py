"""``farflung completion``: what a shell needs to complete farflung's commands and options."""

from __future__ import annotations

import argparse
import sys

SHELLS = ("bash", "zsh")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "completion",
        help="a script that completes commands in bash or zsh",
        description="Print a completion script. bash: put it into ~/.local/share/bash-completion/completions/farflung. "
        "zsh: put it as _farflung into a folder of $fpath.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(command=_completion)


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    from node.cli import main

    sys.stdout.write(shtab.complete(main.parser(), arguments.shell))
    return 0
