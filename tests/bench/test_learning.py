"""The shape of what ``tests.bench.learning`` prints, whatever this machine has."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.bench.learning import PARTS, ROOT


def test_a_part_that_cannot_run_is_null_and_says_why() -> None:
    command = [sys.executable, "-m", "tests.bench.learning", "--json", "--only", "trainer_vs_trl,generation_vs_vllm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert all(found[name] is None for name in PARTS)
    assert "--trl" in found["missing"]["trainer_vs_trl"]
    assert "--model" in found["missing"]["generation_vs_vllm"]
    assert (
        found["missing"]["trainer_idle_share"] == found["missing"]["reward_by_async_level"] == "not asked for (--only)"
    )
    assert found["details"] == {}
