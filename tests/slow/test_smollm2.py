"""A devnet on a real model: SmolLM2-135M in float32, vLLM generating, torch judging.

The model's folder is named by ``FARFLUNG_SMOLLM2``; it takes about 5 GB of memory and, on two cores, half an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.log.offline_verification import verify
from node.roles.engine_client import vllm_installed
from node.store.data_directory import DataDirectory
from protocol.credit.ledger import Ledger
from protocol.records import Step

ROOT = Path(__file__).resolve().parents[2]
MODEL = os.environ.get("FARFLUNG_SMOLLM2", "")
STEPS = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not vllm_installed(), reason="vllm is not installed"),
    pytest.mark.skipif(not MODEL, reason="FARFLUNG_SMOLLM2 names no folder of SmolLM2-135M"),
]

DOMAIN = """\
name = "smollm2"
model = "{model}"

[[task]]
name = "chain_sum"
parameters = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}

[recipe]
group_size = 4
groups_per_submission = 2
groups_per_step = 4
max_prompt_tokens = 64
max_response_tokens = 24
learning_rate = 1e-6
inner_steps = 1

# One machine bears all nodes: what takes a moment on one of them each takes minutes here.
[timings]
presence = 5
epoch = 5
term_silence = 900
verdict_wait = 900
founding_wait = 5
"""


def test_what_vllm_writes_trains_a_real_model_and_is_all_accepted(tmp_path: Path) -> None:
    file = tmp_path / "domain.toml"
    file.write_text(DOMAIN.format(model=MODEL))
    folder = tmp_path / "run"
    command = [sys.executable, "-P", "-m", "node.cli.main", "devnet", "--dir", str(folder), "--domain", str(file)]
    done = subprocess.run(
        [*command, "--engine", "vllm", "--nodes", "4", "--steps", str(STEPS)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=5300,
        check=False,
    )
    logs = {path.parent.name: verify(DataDirectory(path.parent)) for path in sorted(folder.glob("*/log"))}
    nodes = "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*/*.log")))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{nodes}"
    assert [problem for log in logs.values() for problem in log.problems] == []
    assert len({log.replica.heads_root() for log in logs.values()}) == 1
    log = logs["node-1"]
    ledger = Ledger(log.replica)
    assert len([entry for entry in ledger.steps() if isinstance(entry.payload, Step)]) == STEPS
    assert ledger.outstanding() == []
    outcomes = [status.outcome for _, status in ledger.decisions()]
    assert len(outcomes) >= 2 * STEPS
    assert set(outcomes) == {"accepted"}
    assert json.loads((folder / "summary.json").read_text())["nodes"]
