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

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from node.roles.engine_client import vllm_environment, vllm_installed
from node.workers import child_loop, frames, weight_files
from node.workers.child_messages import ConfigureEngine, LoadVersion
from node.workers.child_process import child_environment
from node.workers.frames import Answer, CallAnswered, CallFailed, ChildRequest
from node.workers.model import CausalLM
from protocol.domain import Recipe
from protocol.weights.manifest import Manifest
from tests.node.workers import small
from tests.node.workers.small import LLAMA, QWEN, STARTER

INSTALLED = vllm_installed()
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

    def call(self, request: ChildRequest[Answer]) -> Answer:
        """The answer; raises ``RuntimeError`` with the child's error, ``EOFError`` where it is gone."""
        self._connection.sendall(frames.encode(request))
        body = frames.read_frame(self._connection)
        if body is None:
            raise EOFError(frames.operation_of(type(request)))
        answered: Any = CallAnswered[frames.answer_type(type(request))]  # type: ignore[misc]
        answer: CallAnswered[Answer] | CallFailed = frames.decode(body, answered | CallFailed)
        if isinstance(answer, CallFailed):
            raise RuntimeError(answer.error)
        return answer.answer


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
        env={**child_environment(vllm_environment(threads, cache)), **(extra or {}), "PYTHONPATH": root},
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


def configure(engine: Child, path: Path, recipe: Recipe, **options: int) -> int:
    """Configure ``engine`` with the model in ``path`` and load its version; the checksum."""
    files = str(path / "config.json"), str(path / "tokenizer.json")
    engine.call(msgspec.structs.replace(ConfigureEngine(*files, recipe), **options))
    return load(engine, path)


def load(engine: Child, path: Path, name: str = "version") -> int:
    """Load a version that lies in ``path``."""
    return engine.call(LoadVersion(str(path / f"{name}.manifest"), str(path / f"{name}.raw")))


def _operations() -> list[child_loop.Operation]:
    from node.workers.vllm_child import VllmEngine  # only where vLLM is

    whole = weight_files.map_whole

    def part(manifest: Manifest, path: Path) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in whole(manifest, path).items() if LEFT_OUT not in name}

    class Forgetful(VllmEngine):
        """Loads a part only, from the second load on."""

        def load(self, request: LoadVersion) -> int:
            checksum: int = super().load(request)
            weight_files.map_whole = part
            return checksum

    operations: list[child_loop.Operation] = child_loop.methods(Forgetful())
    return operations


if __name__ == "__main__":
    child_loop.run(_operations)
