"""A node's keys outside its data directory: key files and recovery words."""
