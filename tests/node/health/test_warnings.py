"""Standing warnings."""

from __future__ import annotations

import logging

import pytest

from node.health.warnings import Health


def test_a_warning_stands_until_it_is_cleared_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    health = Health(logging.getLogger("test"))
    health.warn("disk", "the disk is full")
    health.warn("disk", "the disk is full")
    health.warn("weights", "version 3 has not arrived")
    assert health.warnings == {"disk": "the disk is full", "weights": "version 3 has not arrived"}
    health.warn("disk", "the disk fails")
    health.clear("disk")
    health.clear("disk")
    health.clear("nothing")
    assert health.warnings == {"weights": "version 3 has not arrived"}
    assert caplog.messages == [
        "the disk is full",
        "version 3 has not arrived",
        "the disk fails",
        "disk: in order again",
    ]
