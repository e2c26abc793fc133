"""Tries every admitted data set. Run as ``python -m tests.node.tasks.survey DIRECTION MARKER``; it prints JSON.

``DIRECTION`` is the order of the items ("forward" or "backward"): questions must not depend on what was asked before.
Hostile answers go straight to the scorers, past the bounds that would keep them away, and try to make the file MARKER.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

from node.tasks import answer_bounds, process_limits
from node.tasks.allowlist import DATASETS, REASONING_GYM_VERSION
from node.tasks.reasoning_tasks import ReasoningTask
from protocol.taskset import MAX_ITEM

ITEMS = (3, 501, MAX_ITEM)
SLOW = ("futoshiki", "knight_swap", "puzzle24")
"""Generators that take a second for an item are asked for one."""


def hostile(marker: str) -> list[str]:
    call = f"__import__('os').system('touch {marker}')"
    return [call, f"[{call}]", f"[{call} for _ in '1']", f"({call}, 1)"]


def survey(name: str, backward: bool, marker: str) -> dict[str, Any]:
    task = ReasoningTask(name, "{}", REASONING_GYM_VERSION, sandboxed=True)
    items = ITEMS[:1] if name in SLOW else ITEMS
    rows: dict[int, Any] = {}
    for item in reversed(items) if backward else items:
        entry = task._entry(item)
        answer = entry["answer"]
        reward = None if answer is None else task.score(item, str(answer))
        rows[item] = [task.question(item), str(answer), reward]
    text = json.dumps([rows[item] for item in items])
    touched = False
    if not backward:
        for answer in hostile(marker):
            try:
                with process_limits.time_limit(5):
                    task._data.score_answer(answer, task._entry(ITEMS[0]))
            except Exception:
                touched |= os.path.exists(marker)
            touched |= os.path.exists(marker)
    if touched:
        os.unlink(marker)
    return {
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "oracle": [rows[item][2] for item in items],
        "longest": max(len(rows[item][1]) for item in items),
        "nesting": max(answer_bounds.nesting(rows[item][1]) for item in items),
        "touched": touched,
    }


if __name__ == "__main__":
    with open(os.devnull, "w") as null:
        output, sys.stdout = sys.stdout, null  # one data set prints dots while it is imported
        found = {name: survey(name, sys.argv[1] == "backward", sys.argv[2]) for name in DATASETS}
    json.dump(found, output)
