"""Weights on this node: choosing, fetching, verifying, keeping and offering versions."""
