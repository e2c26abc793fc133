"""Verifiable tasks and their rewards, in a sandboxed child process."""
