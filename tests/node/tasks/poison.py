"""A tasks child whose one task does what its responses say: run as ``python -m tests.node.tasks.poison FD``."""

from __future__ import annotations

import os
import socket
import time

from node.tasks.task_child import TasksChild, main
from node.tasks.task_messages import TaskRow
from protocol.errors import LocalError


class Poison:
    count = 2**31

    scored = 0

    def question(self, item: int) -> str:
        if item == 666:
            raise ValueError("no such puzzle")
        return f"question {item}"

    def score(self, item: int, response: str) -> int:
        self.scored += 1
        match response:
            case "die":
                os._exit(3)
            case "hang":
                return sum(range(10**12))
            case "sleep":
                time.sleep(60)
            case "loop":
                while True:
                    pass
            case "swallow":
                for _ in range(2):
                    try:
                        while True:
                            pass
                    except BaseException:
                        continue
            case "memory":
                return len(bytearray(64 << 30))
            case "deep":
                return self.score(item, response)
            case "fork":
                if os.fork() == 0:  # only where the filter failed, and then once
                    os._exit(0)
            case "connect":
                socket.socket().close()
            case "raise":
                raise LocalError("a bug")
            case "slow at first":
                # Within three times the limit, beyond the limit.
                end = time.process_time() + 0.15
                while time.process_time() < end:
                    pass
            case "count":
                return self.scored
        return item


def make(row: TaskRow, *, sandboxed: bool) -> Poison:
    return Poison()


if __name__ == "__main__":
    main(TasksChild(make))
