"""The replicated log of a running node: its own feed, anti-entropy with peers, and the elector's part."""
