"""What the daemon and its bulk child say to each other: msgspec structs, told apart by their names, in frames of
``node.workers.frames``.

1. The first message to a child is ``Configure``, and its answer ``ChildReady``. Nothing else is answered but
   ``Synchronize``; messages are acted upon in the order in which they come.
2. A transfer is named by its object's ``digest``: ``BeginTransfer`` (of what was begun in the store), ``SetHolders``
   (all of them, again whenever that changes) and ``StopTransfer``. What is said about one that is over means nothing.
3. What no direct connection carries the child asks for by ``WantFallback``: one chunk, or which chunks a holder has.
   The daemon fetches that over libp2p, writes a chunk into the store, and says so.

Both processes import this module: it holds neither trio nor libp2p.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from node.weights.bulk.serving_limits import ServingLimits

Outcome = Literal["ok", "lacks", "busy", "wrong", "unkept", "failed"]
"""What became of a chunk that was asked for over libp2p: "ok" (it is in the store), "unkept" (our own disk refused it),
or what is wrong with its holder."""


class Message(msgspec.Struct, tag=True, frozen=True):
    """Any of them."""


class ObjectMessage(Message, frozen=True):
    """One about the object ``digest``, or its transfer."""

    digest: bytes


class HolderMessage(ObjectMessage, frozen=True):
    """One about a holder of it."""

    node: bytes


class HolderRow(msgspec.Struct, frozen=True, array_like=True):
    """Who holds an object, whole or in part, and how it is reached: at a multiaddress with a token, or over libp2p
    alone (an empty ``address``). ``foreign``: see ``node.weights.bulk.token_exchange``, rule 4."""

    node: bytes
    address: str
    token: str
    foreign: bool
    whole: bool
    spared: bool
    preference: float


# From the daemon


class Configure(Message, frozen=True):
    """What a child knows from its start.

    ``sockets`` are the descriptors of listening sockets; in a private domain ``certificate`` is this node's own with
    its key (PEM), ``admitted`` those of its peers (node id and DER).
    """

    domain: bytes
    secret: bytes
    versions: str
    sockets: list[int]
    limits: ServingLimits
    certificate: str = ""
    admitted: list[tuple[bytes, bytes]] = []


class AdmitNode(Message, frozen=True):
    """Know a node by this certificate (DER) from now on."""

    node: bytes
    certificate: bytes


class ForgetObject(ObjectMessage, frozen=True):
    """An object was deleted: let go of its files, which take room on the disk for as long as they are open."""


class ChunksCame(Message, frozen=True):
    """Chunks came into the store in another way: wake those who wait for some."""


class Synchronize(Message, frozen=True):
    """Answer ``Synchronized`` once all that was said before is done."""

    call: int


class BeginTransfer(ObjectMessage, frozen=True):
    """Fetch what lacks of an object."""


class SetHolders(ObjectMessage, frozen=True):
    """These are the holders of an object, and no others."""

    rows: list[HolderRow]


class StopTransfer(ObjectMessage, frozen=True):
    """Fetch no more of it."""


class GiveChunk(HolderMessage, frozen=True):
    """The answer to a ``WantFallback`` for a chunk."""

    index: int
    outcome: Outcome


class GiveHaves(HolderMessage, frozen=True):
    """The answer to a ``WantFallback`` of index −1; an empty bitmap where the holder gave none."""

    bitmap: bytes


# From the child


class ChildReady(Message, frozen=True):
    """It serves, and takes messages."""


class Synchronized(Message, frozen=True):
    """The answer to ``Synchronize``."""

    call: int


class TransferProgress(ObjectMessage, frozen=True):
    """How far a transfer is: chunks, bytes a second, and the peers that send now. ``why`` it does not get on, for
    people."""

    have: int
    total: int
    rate: int = 0
    peers: int = 0
    why: str = ""


class TransferDone(ObjectMessage, frozen=True):
    """The object is whole."""


class TransferFailed(ObjectMessage, frozen=True):
    """Nothing of it will come."""

    why: str


class DiskRefused(ObjectMessage, frozen=True):
    """Our own disk did not take a chunk: the daemon decides what becomes of the transfer."""

    number: int
    text: str


class HolderFault(HolderMessage, frozen=True):
    """What a holder did wrong."""

    text: str


class RouteFailed(HolderMessage, frozen=True):
    """A holder did not take the token, or nobody answered at its address: another route is wanted. ``misled``: at the
    foreign address that it named there are no weights."""

    misled: bool = False


class WantFallback(HolderMessage, frozen=True):
    """Fetch this chunk from a holder over libp2p; where ``index`` is −1 ask it which chunks it has."""

    index: int


ToTransfer = BeginTransfer | SetHolders | StopTransfer | GiveChunk | GiveHaves
ToChild = Configure | AdmitNode | ForgetObject | ChunksCame | Synchronize | ToTransfer
FromTransfer = TransferProgress | TransferDone | TransferFailed | DiskRefused | HolderFault | RouteFailed | WantFallback
FromChild = ChildReady | Synchronized | FromTransfer
