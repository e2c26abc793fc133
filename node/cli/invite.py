"""``farflung domain invite``: let somebody in whom no work lets in, or before others."""

from __future__ import annotations

import argparse
import secrets

from node.api.control_client import Declined, Unavailable
from node.cli import options
from node.cli.node_reading import ask
from node.errors import UserError
from protocol.identity import Identity

CUTS = 8640
"""Cuts for which an invitation is good unless its maker says otherwise: a day at an epoch of ten seconds."""


def add_to(actions: options.Parsers) -> None:
    """Add the action's parser to ``farflung domain``."""
    parser = options.add_command(actions, "invite", _invite, help="make an address that lets somebody in", json=True)
    options.add_number(parser, "--uses", default=1, help="nodes that it lets in (default: 1)")
    options.add_number(
        parser, "--expires", metavar="CUTS", default=CUTS, help=f"cuts for which it is good (default: {CUTS})"
    )
    parser.add_argument("--revoke", metavar="ADDRESS", help="take an invitation back instead: the address, or its seed")


def _invite(arguments: argparse.Namespace) -> int:
    """Make an invitation and print the address that holds it: whoever joins by it is admitted, also where the domain is
    for the invited only. The founder and the electors may invite; each lets in 32 nodes in 100 cuts at most. Keep the
    address as you would a password. With --revoke, take one back."""
    directory = options.existing_directory(arguments)
    seed, uses = secrets.token_bytes(32), arguments.uses
    if arguments.revoke is not None:
        text = arguments.revoke.rpartition("invite=")[2]
        try:
            seed, uses = bytes.fromhex(text), 0
        except ValueError:
            seed = b""
        if len(seed) != 32:
            raise UserError("--revoke: no invitation in it", "give the address that farflung domain invite printed")
    elif uses < 1:
        raise UserError("--uses: an invitation lets in one node or more", "--revoke takes one back")
    try:
        answer = ask(directory, "invite", key=Identity(seed).node.hex(), uses=uses, cuts=arguments.expires)
    except Unavailable as error:
        remedy = "ask the founder" if isinstance(error, Declined) else "the node's daemon must run: farflung run"
        raise UserError(str(error), remedy) from None
    found = [f"{address}?domain={answer['domain']}&invite={seed.hex()}" for address in answer["addresses"]]

    def say() -> None:
        if arguments.revoke is not None:
            print("with the next cut the invitation lets nobody in any more")
        else:
            print(f"good for {uses} node{'s' if uses > 1 else ''} until cut {answer['expires']}; they join with:")
            print("\n".join(f"farflung join '{address}'" for address in found))

    options.show(arguments, {"uses": uses, "expires": answer["expires"], "addresses": found}, say)
    return 0
