"""The replicated log: entries, feeds, heads, Merkle trees, the replica, electors and their cuts, and proofs of
entries."""
