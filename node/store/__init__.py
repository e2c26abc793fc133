"""Durable state: the SQLite log store, the blob store and the data directory."""
