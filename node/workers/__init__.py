"""Child processes that own torch; the daemon only speaks to them through ``node.workers.child_process``."""
