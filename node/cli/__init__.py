"""The ``farflung`` command: one module a command."""
