"""The network: a guarded libp2p host, gossip, log sync and blob transfer."""
