"""Farflung as a systemd service: installing it, and what the daemon tells the service manager."""
