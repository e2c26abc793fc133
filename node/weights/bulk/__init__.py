"""The data plane: weights between nodes over HTTP, in a child process beside the daemon."""
