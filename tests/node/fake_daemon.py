"""A stand-in for a daemon in tests of the devnet: the control socket's answers and nothing behind them.

It makes a step every tenth of a second up to ``devnet.pause_at_step``. A file ``behaviour`` in its data directory
changes it: "different" has another heads root, "dies" dies once at step 2, "slow" makes two steps a second, "mistake"
ends as for its user's mistake, "deaf" ignores SIGTERM and has a child that outlives it.
It imports nothing of ours, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any


def status(config: dict[str, Any], step: int, behaviour: str) -> dict[str, Any]:
    """What a daemon says of itself after ``step`` steps."""
    done = 0 < config["devnet"]["pause_at_step"] <= step
    rows = [
        {
            "step": number,
            "reward": number / 100,
            "lag_mean": 1.0,
            "lag_max": 2,
            "accepted": 8,
            "rejected": 0,
            "trained": 8,
            "train_ms": 60,
            "wait_ms": 30,
            "publish_ms": 10,
            "blocked_ms": 0,
        }
        for number in range(1, step + 1)
    ]
    return {
        "name": config["name"],
        "node": config["name"],
        "role": "relay",
        "domain": "d0" * 32,
        "version": step,
        "step": step,
        "heads_root": ("ff" if behaviour == "different" else "aa") * 32,
        "cut_height": step,
        "final": done,
        "pending_audits": 0 if done else 1,
        "generating": not done,
        "evaluating": False,
        "evaluations": [evaluation(number) for number in range(max(0, step - 1), step + 1)],
        "peers": 4,
        "bytes_sent": step * 1000,
        "bytes_received": step * 1000,
        "tokens": step * 10,
        "health": [],
        "credit": {config["name"]: step},
        "steps": rows,
    }


def evaluation(number: int) -> dict[str, Any]:
    """What the trainer measured of version ``number``."""
    rate = {"pass_rate": 0.5, "pass_rate_low": 0.4, "pass_rate_high": 0.6}
    return {"version": number, "scores": [{"task": "sums", "questions": 64, **rate, "reward": 0.5, "length": 3.0}]}


def serve(folder: Path, behaviour: str) -> None:
    """Answer until SIGTERM."""
    began = time.monotonic()
    os.chdir(folder)
    Path("control.sock").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("control.sock")
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                config = tomllib.loads(Path("farflung.toml").read_text())
                limit = config["devnet"]["pause_at_step"]
                step = int((time.monotonic() - began) * (2 if behaviour == "slow" else 10))
                if behaviour == "dies" and step >= 2 and not Path("died").exists():
                    Path("died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                answer = status(config, min(step, limit) if limit else step, behaviour)
                connection.sendall(json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Run as ``python fake_daemon.py DATA_DIR``."""
    folder = Path(sys.argv[1])
    file = folder / "behaviour"
    behaviour = file.read_text() if file.exists() else ""
    if behaviour == "mistake":
        print("farflung: port 4001 is busy; choose another", file=sys.stderr)
        sys.exit(2)
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
        (folder / "child").write_text(str(child.pid))
    serve(folder, behaviour)


if __name__ == "__main__":
    main()
