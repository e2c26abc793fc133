"""``farflung join ADDRESS``: take part in a domain, knowing nothing but the address of one of its nodes.

Nothing is kept before its user agreed: the peer is asked with a key of its own (``node.domain.invitation``).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import trio

from node import daemon
from node.cli import options, tables
from node.cli.init import announce, furnish
from node.config import Config
from node.domain import invitation, joining
from node.domain.invitation import DomainOffer, Invitation
from node.errors import UserError, os_errors
from node.store.data_directory import DataDirectory
from protocol.constants import MILLION
from protocol.identity import peer_id

PATIENCE: Final = 15.0
"""Seconds that the peer has for each of its answers."""
ELSEWHERE: Final = "name a new folder with --data-dir"
"""What to do where the node's folder belongs to another domain."""


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    parser = options.add_command(commands, "join", join, help=phrase)
    parser.add_argument(
        "address",
        metavar="ADDRESS",
        help="/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…, with ?domain=ID behind it (in quotes) to be refused elsewhere",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--no-run", action="store_true", help="prepare the folder, and leave the start to another")
    options.add_config(parser)


def join(
    arguments: argparse.Namespace,
    inspect: Callable[[Invitation, float], Awaitable[DomainOffer]] | None = None,
    start: Callable[[DataDirectory, Config], None] | None = None,
) -> int:
    """Ask the node at ADDRESS for its domain's signed genesis, show what this node would run, and ask once. Then the
    node's folder belongs to that domain for good, remembers its peers, and the node runs; later farflung run is enough.

    Join, by what the peer offers as ``inspect`` finds it, and ``start`` the daemon.
    """
    wanted = invitation.parse(arguments.address)
    directory = options.data_directory(arguments)
    config = options.configuration(arguments, directory, may_lack=True)
    if not arguments.yes and not arguments.terminal.listens():
        raise UserError("join asks before it runs anything, and there is no terminal to ask at", "add --yes")
    directory.require_usable()
    joining.require_same(directory, wanted.domain, ELSEWHERE)
    offer = trio.run(inspect or invitation.inspect, wanted, PATIENCE)
    joining.require_same(directory, offer.domain.id, ELSEWHERE)
    tables.facts(_shown(offer, config), title="This node would run:")
    if not arguments.yes and not arguments.terminal.agreed("Join it?"):
        options.note("nothing was kept")
        return 1
    new_key = _keep(arguments, directory, wanted, offer)
    # Whoever starts it unattended may keep the output in a journal: secrets are not for that.
    announce(directory, new_key, secret=not arguments.yes and arguments.terminal.shows())
    if arguments.no_run:
        # How it is started only whoever asked for this knows: the service's installer, say.
        print(f"joined {offer.domain.name}; nothing runs yet")
        return 0
    later = _run_line(arguments, directory)
    print(f"joined {offer.domain.name}; the node runs until Ctrl-C, and later with: {later}", flush=True)
    (start or daemon.run)(directory, config)
    return 0


def _run_line(arguments: argparse.Namespace, directory: DataDirectory) -> str:
    """The command that starts this node again."""
    words = ["farflung", "run"]
    if arguments.data_dir is not None:
        words += ["--data-dir", str(directory.path)]
    if arguments.config is not None:
        words += ["--config", str(arguments.config.absolute())]
    return shlex.join(words)


def _keep(arguments: argparse.Namespace, directory: DataDirectory, wanted: Invitation, offer: DomainOffer) -> bool:
    """Make the folder's content; whether the recovery key was made now."""
    with directory.open_locked():
        _, made = furnish(arguments, directory)
        directory.save_genesis(offer.genesis)
        if wanted.seed is not None:
            directory.save_invitation(wanted.seed)
        peer = wanted.address.rpartition("/")[2]
        known = dict(directory.known_peers())
        known[peer] = tuple(dict.fromkeys([wanted.address, *known.get(peer, ())]))
        with os_errors(directory.peers_file, "cannot be written", "check the rights and the room"):
            directory.save_peers(known)
    return made


def _shown(offer: DomainOffer, config: Config) -> Iterator[tuple[str, str]]:
    domain, recipe, model = offer.domain, offer.domain.recipe, offer.domain.model
    yield "domain", f"{domain.name}{', a development network' if domain.devnet else ''}"
    yield "id", domain.id.hex()
    yield "signed by", peer_id(domain.creator)
    yield "electors", f"{len(domain.electors)}{', the signer among them' if domain.creator in domain.electors else ''}"
    total = sum(task.weight for task in domain.tasks)
    for number, task in enumerate(domain.tasks):
        parameters = f", {task.parameters}" if task.parameters != "{}" else ""
        yield "tasks" if number == 0 else "", f"{task.weight / total:.0%} {task.name} ({task.kind}{parameters})"
    yield "model", ", ".join(filter(None, (model.architecture, offer.shape, model.compute_dtype)))
    if offer.parameters is None or offer.size is None:
        yield "size", "the peer does not tell"
    else:
        yield "size", f"{human_count(offer.parameters)} parameters, {offer.size / 1e6:,.1f} MB a version"
    policy = domain.policy
    yield "roles", f"of {', '.join(config.willing)} the one that is needed"
    yield (
        "policy",
        f"from {policy.min_nodes} nodes on; validators: {policy.validators_min} or more, "
        f"relays: {policy.relays_min} or more",
    )
    yield (
        "recipe",
        f"asynchronous GRPO, async level {recipe.async_level}, {recipe.groups_per_step} groups of {recipe.group_size} "
        f"a step, up to {recipe.max_response_tokens} tokens a response, temperature {recipe.temperature / MILLION:g}, "
        f"learning rate {recipe.learning_rate / 1e12:g}",
    )


def human_count(count: int) -> str:
    """``count`` for people: "0.6 M"."""
    return f"{count / 1e9:.1f} G" if count >= 1e9 else f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
