"""``farflung service``: the node as a systemd service."""

from __future__ import annotations

import argparse
import os

from node.cli import options
from node.systemd import installing


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    actions = options.add_group(
        commands, "service", help=phrase, description="Install or remove the node's systemd service."
    )
    install = options.add_command(
        actions, "install", _install, help="install or upgrade the service, and start it", data_dir=False
    )
    install.add_argument("--user", action="store_true", help="for this user only, by systemctl --user")
    install.add_argument("--join", metavar="ADDRESS", help="the address of a peer of the domain to join first")
    install.add_argument("--yes", action="store_true", help="do not ask before joining")
    remove = options.add_command(actions, "remove", _remove, help="stop and remove the service", data_dir=False)
    remove.add_argument("--user", action="store_true", help="the service of this user")
    remove.add_argument("--purge", action="store_true", help="remove the node's key and all its data as well")


def _place(arguments: argparse.Namespace) -> installing.ServicePlace:
    return installing.user_place() if arguments.user or os.geteuid() != 0 else installing.system_place()


def _install(arguments: argparse.Namespace) -> int:
    """Write the unit file, enable the service and start it; returns when it serves. As root it is the machine's: user
    farflung, data in /var/lib/farflung, configuration in /etc/farflung/farflung.toml. Otherwise, and with --user, it is
    the user's own. Again, it upgrades in place: key, data and configuration stay."""
    return installing.install(_place(arguments), address=arguments.join, yes=arguments.yes)


def _remove(arguments: argparse.Namespace) -> int:
    """Stop and remove the service. The node's keys, configuration, domain, log and known peers stay; weights and other
    files that peers give back go."""
    installing.remove(_place(arguments), purge=arguments.purge)
    return 0
