"""What a node measures, and where it goes: metrics, trackers, plots."""
