"""Tests of node/net."""
