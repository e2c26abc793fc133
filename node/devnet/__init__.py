"""A whole network on one machine, its display and its report."""
