"""What the vLLM child is started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from node.workers import vllm_start
from node.workers.child_process import child_environment


def test_the_child_computes_in_as_many_threads_as_it_is_given(tmp_path: Path) -> None:
    threads = len(os.sched_getaffinity(0))  # MKL takes no more
    environment = child_environment(vllm_start.environment(threads, tmp_path))
    words = "import torch; print(torch.get_num_threads())"
    found = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=True)
    assert int(found.stdout) == threads
