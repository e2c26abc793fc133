from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from node.workers import child_loop, frames


def boom() -> dict[str, Any]:
    raise RuntimeError("a\nb")


def user() -> dict[str, Any]:
    raise child_loop.UserError("no such task: x; y")


OPERATIONS: dict[str, child_loop.Operation] = {"boom": boom, "user": user, "double": lambda n: {"n": 2 * n}}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"op": "double", "n": 4}, {"ok": {"n": 8}}),
        ({"op": "user"}, {"error": "no such task: x; y", "kind": "user"}),
        ({"op": "boom"}, {"error": "RuntimeError: a b", "kind": "internal"}),
        ({"op": "?"}, {"error": "unknown operation '?'", "kind": "internal"}),
        ({"op": [1]}, {"error": "unknown operation [1]", "kind": "internal"}),
        ({}, {"error": "unknown operation None", "kind": "internal"}),
    ],
)
def test_answers(request_: dict[str, Any], expected: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert child_loop.answer(OPERATIONS, dict(request_)) == expected
    assert ("Traceback" in capsys.readouterr().err) == (request_.get("op") == "boom")


def test_serving_until_the_other_end_closes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = threading.Thread(target=child_loop.serve, args=(OPERATIONS, theirs))
        server.start()
        for number in range(3):
            ours.sendall(frames.encode({"op": "double", "n": number}))
            body = frames.read_frame(ours)
            assert body is not None
            assert frames.decode(body, dict[str, Any]) == {"ok": {"n": 2 * number}}
        ours.shutdown(socket.SHUT_WR)
        server.join(5)
        assert not server.is_alive()
