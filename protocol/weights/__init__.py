"""Weights between nodes: manifests, deltas, chunk sets, and the decisions of a swarm."""
