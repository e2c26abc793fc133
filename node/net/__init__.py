"""The network: a guarded libp2p host, gossip, log sync and blob transfer."""

from node.net import libp2p_import

# Here, because any module of this package may be the first to import libp2p.
libp2p_import.install()
