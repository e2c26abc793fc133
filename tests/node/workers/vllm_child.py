"""The vLLM engine child for tests, spoken to directly: ``with running() as child``; and one that loads badly.

``python -m tests.node.workers.vllm_child FD`` is the engine child whose loads leave out the tensors of ``LEFT_OUT``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from node.workers import child_loop, frames, vllm_start, weight_files
from node.workers.child_process import child_environment
from node.workers.model import CausalLM
from protocol.weights.manifest import Manifest
from tests.node.workers import small
from tests.node.workers.small import LLAMA, QWEN, STARTER

INSTALLED = vllm_start.installed()
REASON = "vllm is not installed"
LEFT_OUT = "layers.1."

# vLLM's kernels for a CPU know heads from 32 on, and the starter's tokenizer has 131 tokens.
TINY_LLAMA = {**LLAMA, "vocab_size": 160, "hidden_size": 64, "head_dim": 32, "num_key_value_heads": 2}
TINY_QWEN = {**QWEN, "vocab_size": 160, "hidden_size": 128, "num_key_value_heads": 2}


class Child:
    """A running child. ``call`` blocks."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.pid = process.pid
        self._connection = connection

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The answer of an operation; raises ``RuntimeError`` with its error, ``EOFError`` where the child is gone."""
        self._connection.sendall(frames.encode({"op": op, **arguments}))
        body = frames.read_frame(self._connection)
        answer = None if body is None else frames.decode(body, dict[str, Any])
        if answer is None:
            raise EOFError(op)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        found: dict[str, Any] = answer["ok"]
        return found


@contextmanager
def running(
    cache: Path, module: str = "node.workers.vllm_child", *, threads: int = 1, extra: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """A started vLLM child; its process group is killed at the end. ``extra`` adds to its environment."""
    ours, theirs = socket.socketpair()
    ours.settimeout(900)
    root = str(Path(__file__).resolve().parents[3])
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
        env={**child_environment(vllm_start.environment(threads, cache)), **(extra or {}), "PYTHONPATH": root},
        cwd=root,
    )
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        ours.close()


def folder(path: Path, raw: dict[str, Any], seed: int = 0) -> CausalLM:
    """Make ``path`` a Hugging Face folder of a small random model, with the version's manifest and whole in it."""
    path.mkdir(exist_ok=True)
    made = small.model(small.config(path, raw), seed)
    save_file({name: value.detach().clone() for name, value in made.named_parameters()}, path / "model.safetensors")
    (path / "tokenizer.json").write_bytes((STARTER / "tokenizer.json").read_bytes())
    small.store(made, path)
    return made


def configure(engine: Child, path: Path, recipe: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Configure ``engine`` with the model in ``path`` and load its version."""
    engine.call(
        "configure", config=str(path / "config.json"), tokenizer=str(path / "tokenizer.json"), recipe=recipe, **options
    )
    return load(engine, path)


def load(engine: Child, path: Path, name: str = "version") -> dict[str, Any]:
    """Load a version that lies in ``path``."""
    return engine.call("load", manifest=str(path / f"{name}.manifest"), weights=str(path / f"{name}.raw"))


def _operations() -> dict[str, child_loop.Operation]:
    from node.workers import vllm_child  # only where vLLM is

    found = vllm_child.operations()
    whole = weight_files.map_whole

    def part(manifest: Manifest, path: Path) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in whole(manifest, path).items() if LEFT_OUT not in name}

    def load(**arguments: Any) -> dict[str, Any]:
        answer = found["load"](**arguments)
        weight_files.map_whole = part  # from the second load on
        return answer

    return {**found, "load": load}


if __name__ == "__main__":
    child_loop.run(_operations)
