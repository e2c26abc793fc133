from __future__ import annotations

import socket
import threading

import pytest

from node.errors import UserError
from node.workers import child_loop, frames
from node.workers.frames import CallAnswered, CallFailed, ChildRequest


class Double(ChildRequest[int], frozen=True, tag="double"):
    number: int


class Boom(ChildRequest[None], frozen=True, tag="boom"):
    pass


class Ask(ChildRequest[None], frozen=True, tag="user"):
    pass


def double(request: Double) -> int:
    return 2 * request.number


def boom(request: Boom) -> None:
    raise RuntimeError("a\nb")


def ask(request: Ask) -> None:
    raise UserError("no such task: x; y")


TABLE = child_loop.table([double, boom, ask])


def read(frame: bytes, answer: type = int) -> object:
    """The answer, or the failure, in a frame."""
    return frames.decode(frame[frames.HEADER_BYTES :], CallAnswered[answer] | CallFailed)  # type: ignore[valid-type]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Double(4), CallAnswered(8)),
        (Ask(), CallFailed("no such task: x; y", "user")),
        (Boom(), CallFailed("RuntimeError: a b", "internal")),
    ],
)
def test_answers(request_: ChildRequest[object], expected: object, capsys: pytest.CaptureFixture[str]) -> None:
    body = frames.encode(request_)[frames.HEADER_BYTES :]
    assert read(child_loop.answer(TABLE, body)) == expected
    assert ("Traceback" in capsys.readouterr().err) == isinstance(request_, Boom)


@pytest.mark.parametrize("value", [{"op": "?"}, {"op": [1]}, {}, {"op": "double"}, {"op": "double", "number": "4"}, 7])
def test_what_is_no_request_is_answered_in_one_line(value: object) -> None:
    failure = read(child_loop.answer(TABLE, frames.encode(value)[frames.HEADER_BYTES :]))
    assert isinstance(failure, CallFailed)
    assert failure.kind == "internal"
    assert "no known form" in failure.error


def test_an_operation_answers_what_its_request_asks_for() -> None:
    def wrong(request: Double) -> str:
        return "8"

    with pytest.raises(TypeError, match="asks for <class 'int'>"):
        child_loop.table([wrong])


def test_serving_until_the_other_end_closes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = threading.Thread(target=child_loop.serve, args=(TABLE, theirs))
        server.start()
        for number in range(3):
            ours.sendall(frames.encode(Double(number)))
            body = frames.read_frame(ours)
            assert body is not None
            assert frames.decode(body, CallAnswered[int]) == CallAnswered(2 * number)
        ours.shutdown(socket.SHUT_WR)
        server.join(5)
        assert not server.is_alive()
