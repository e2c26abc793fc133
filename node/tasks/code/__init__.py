"""Code tasks: programs out of responses, run against hidden tests in a sandbox of their own."""
