"""What keeps a daemon's services going, and what it says of those that do not."""
