"""How long a devnet's trainer has nothing to do: ``python -m tests.bench.learning_idle [--json] [--steps N]``.

A devnet of five nodes on the starter model: a trainer, a validator, a relay and two inference nodes. The split comes
from the ``step`` entries of its log, without the first ``WARM`` steps.

``idle``        the share of the time from step to step in which the trainer waited for rollouts
``training``    the share in which it trained
``publishing``  the rest: it could not train because what it had trained was not published yet
``busy``        the share of this machine's processors that the whole network used meanwhile, starting and ending
                included: close to 1 it is the processors, not the protocol, that the trainer waits for
``lag``         the mean policy lag of what was trained on
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from node.api.node_rows import step_row
from node.devnet.summary import StepRow
from node.log.offline_verification import verify
from node.store.data_directory import DataDirectory
from protocol.constants import MILLION
from protocol.credit.ledger import Ledger
from protocol.records import Step
from tests.bench.processes import Failed

NODES: Final = 5
INFERENCE: Final = 2
WARM: Final = 5
"""Steps during which roles and caches settle."""


def processor_seconds() -> float:
    """What the children that have ended used so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(steps: int) -> dict[str, Any]:
    """Run the devnet; see the module's text for the fields. Raises ``Failed``."""
    with tempfile.TemporaryDirectory(prefix="farflung-bench-") as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-P", "-m", "node.cli.main", "devnet", "--dir", str(folder)]
        began, used = time.monotonic(), processor_seconds()
        done = subprocess.run(
            [*command, "--nodes", str(NODES), "--steps", str(steps)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds, used = time.monotonic() - began, processor_seconds() - used
        if done.returncode:
            raise Failed(f"the devnet ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
        ledger = Ledger(verify(DataDirectory(folder / "node-1")).replica)
    roles = [ledger.standing_role(author) for author in ledger.authors()]
    if roles.count("inference") != INFERENCE:
        raise Failed(f"the devnet ended with the roles {', '.join(roles)}")
    rows = [entry.payload for entry in ledger.steps() if isinstance(entry.payload, Step)][WARM:]
    if not rows:
        raise Failed(f"at least {WARM + 1} steps are needed")
    total = sum(StepRow.of(step_row(row)).seconds for row in rows)
    idle = sum(row.wait_ms for row in rows) / 1000 / total
    training = sum(row.train_ms for row in rows) / 1000 / total
    return {
        "idle": round(idle, 3),
        "training": round(training, 3),
        "publishing": round(1 - idle - training, 3),
        "busy": round(used / seconds / len(os.sched_getaffinity(0)), 3),
        "step_seconds": round(total / len(rows), 3),
        "lag": round(sum(row.lag_mean for row in rows) / len(rows) / MILLION, 2),
        "steps": len(rows),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        found = measure(arguments.steps)
    except Failed as why:
        sys.exit(str(why))
    print(json.dumps(found) if arguments.json else "\n".join(f"{name:<14} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
