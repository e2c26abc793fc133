"""The network: a guarded libp2p host, gossip, log sync and blob transfer."""

from node.net import lean

# Here, because any module of this package may be the first to import libp2p.
lean.install()
