"""``farflung doctor``: what on this machine and in this data directory keeps a node from working, and the remedy."""
