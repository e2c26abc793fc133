"""Who a command meets in tests: a person at the terminal, or nobody, and a daemon on the control socket."""

from __future__ import annotations

import argparse
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from node.cli import main
from node.cli.terminal import Terminal
from node.store.data_directory import DataDirectory


class Person(Terminal):
    """Somebody who types ``answers``, and sees the output where ``sees`` is set."""

    def __init__(self, *answers: str, sees: bool = False) -> None:
        self.answers = list(answers)
        self.sees = sees

    def listens(self) -> bool:
        return True

    def shows(self) -> bool:
        return self.sees

    def ask(self, question: str) -> str:
        print(question, end="")
        return self.ask_hidden(question)

    def ask_hidden(self, question: str) -> str:
        if not self.answers:
            raise EOFError
        return self.answers.pop(0)


class Nobody(Terminal):
    """A pipe at both ends."""

    def listens(self) -> bool:
        return False

    def shows(self) -> bool:
        return False


def carry_out(
    command: Callable[..., int], *words: object, terminal: Terminal | None = None, **collaborators: Any
) -> int:
    """The exit code of ``command``, a command's function, for a command line, with collaborators of the test's own."""

    def run() -> int:
        chosen: argparse.Namespace = main.parser().parse_args([str(word) for word in words])
        chosen.terminal = terminal or Nobody()
        return command(chosen, **collaborators)

    return main.exit_code(run)


@contextmanager
def serving(directory: DataDirectory, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[list[str]]:
    """A daemon on the control socket that gives ``answer(request)``; gives the operations that it was asked for."""
    asked: list[str] = []
    with socket.socket(socket.AF_UNIX) as listener, directory.socket_address() as address:
        listener.bind(address)
        listener.listen()

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    line = connection.recv(10_000)
                    if not line:
                        return
                    request = json.loads(line)
                    asked.append(request["op"])
                    connection.sendall(json.dumps(answer(request)).encode() + b"\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield asked
        finally:
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(address)
            thread.join()
            directory.control_socket.unlink()
