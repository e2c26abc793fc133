"""The engine child on vLLM: the same groups as ``node.workers.engine_child`` writes, many sequences at a time.

1. vLLM's scheduler, executor and, on one device, its worker live in this process: killing its process group leaves
   nothing behind that holds memory, and one process has to load torch instead of three. Tensor-parallel ranks are
   processes of their own, in the same group.
2. One request is one response; the requests of all groups wait in vLLM's queue from the start, so that its batch stays
   full. A group's proofs are built in a thread as soon as its last response ends, while others are still written.
3. A generation runs to its end on the version it began with, because a load waits for it. After a load the prefix cache
   is emptied: it holds keys and values of the old weights.
4. An exception out of vLLM's step leaves its state unknown, so the process ends; whoever called starts another and has
   the same work done again, with the same result.
5. vLLM reads a configuration written from the fields that ``node.workers.model_config`` understands, never the domain's
   file: it cannot be talked into another model than the one that validators replay.
6. Python dispatches each operation (``enforce_eager``) on a CPU: compiled code would keep calling the packed weights
   that a reload has replaced.

``node.roles.engine_client`` has the variables that the process must be started with.
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from vllm import EngineArgs, SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.llm_engine import LLMEngine

from node.errors import UserError
from node.workers import child_loop
from node.workers.child_messages import ConfigureEngine, CountRewritten
from node.workers.engine_child import EngineChild
from node.workers.generation import SamplingSettings, Written, build_proofs, micro
from node.workers.model_config import ARCHITECTURES, ModelConfig, config_json
from node.workers.vllm_worker import EXTRA, SamplerV1, WorkerExtension, total
from proofs.checksum import checksum_of_sums
from protocol.errors import LocalError

MAX_SEQUENCES: Final = 256
"""Sequences decoded together at most."""
CPU_BLOCK: Final = 32
"""Tokens of one block of the cache on a CPU: vLLM's kernels want a multiple of 32, and whole blocks of a prompt are
shared by its group."""
CPU_CACHE_SHARE: Final = 0.25
"""Share of the free memory of a machine without a GPU that caches may take."""
BROKEN: Final = 70
"""Exit code after an exception out of vLLM (EX_SOFTWARE of sysexits.h)."""


@dataclass(slots=True)
class _Group:
    """A group being written: its responses by number, and its proofs once all are there."""

    prompt: Sequence[int]
    seed: bytes
    written: dict[int, Written]
    proofs: Future[bytes] | None = None


class VllmEngine(EngineChild):
    """Configured once: vLLM holds on to the device."""

    def __init__(self) -> None:
        super().__init__()
        self._llm: Any = None
        self._proving = ThreadPoolExecutor(1, "proofs")
        self._count = 0

    def _build(self, config: ModelConfig, settings: SamplingSettings, request: ConfigureEngine) -> None:
        tensor_parallel, dtype = request.tensor_parallel, request.dtype
        cache_bytes, max_batched_tokens = request.cache_bytes, request.max_batched_tokens
        if config.foreign:
            raise UserError(
                f"vLLM generates with models of {', '.join(ARCHITECTURES)} here, not with this {config.architecture}: "
                "set engine to torch on this node"
            )
        if config.key_value_heads % tensor_parallel:
            raise UserError(
                f"tensor_parallel {tensor_parallel} does not divide the model's {config.key_value_heads} key-value "
                "heads: copies of heads would hide a wrong load from the checksum"
            )
        longest = settings.max_prompt_tokens + settings.max_tokens
        cpu = not torch.cuda.is_available()
        if cpu and config.head_size not in CPUAttentionBackend.get_supported_head_sizes():
            raise UserError(
                f"vLLM has no attention for heads of {config.head_size} on a CPU: set engine to torch on this node"
            )
        if config.architecture == "qwen2" and config.head_size * config.heads != config.hidden:
            raise UserError(
                f"vLLM's qwen2 takes heads to be of {config.hidden // config.heads}, not of {config.head_size}: set "
                "engine to torch on this node"
            )
        options: dict[str, Any] = {}
        if cpu:
            wide = {"float32": 4, "bfloat16": 2}[dtype]
            token = 2 * config.layers * config.key_value_heads * config.head_size * wide // tensor_parallel
            blocks = -(-longest // CPU_BLOCK) + 1
            wanted = MAX_SEQUENCES * blocks * CPU_BLOCK * token
            most = int(CPU_CACHE_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
            least = 2 * blocks * CPU_BLOCK * token
            options = {
                "block_size": CPU_BLOCK,
                "kv_cache_memory_bytes": cache_bytes or max(least, min(wanted, most)),
                "enforce_eager": True,
            }
        elif cache_bytes is not None:
            options = {"kv_cache_memory_bytes": cache_bytes}
        with tempfile.TemporaryDirectory(prefix="farflung-model-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_json(config, longest, dtype)))
            self._llm = LLMEngine.from_engine_args(
                EngineArgs(
                    model=folder,
                    skip_tokenizer_init=True,
                    load_format="dummy",
                    dtype=dtype,
                    seed=0,
                    generation_config="vllm",
                    max_model_len=longest,
                    max_num_seqs=min(MAX_SEQUENCES, max_batched_tokens or MAX_SEQUENCES),
                    max_num_batched_tokens=max_batched_tokens,
                    enable_prefix_caching=True,
                    async_scheduling=False,
                    enable_batch_sharded_sampling=False,
                    tensor_parallel_size=tensor_parallel,
                    logits_processors=[f"{SamplerV1.__module__}:{SamplerV1.__name__}"],
                    worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
                    disable_log_stats=True,
                    **options,
                )
            )
        self._llm.collective_rpc("farflung_attach")

    def _load(self, manifest: Path, weights: Path) -> int:
        try:
            ranks = self._llm.collective_rpc("farflung_load", args=(str(manifest), str(weights)))
        except UserError:
            raise
        except Exception:
            self._end()
        if not self._llm.reset_prefix_cache():
            self._end()
        return checksum_of_sums([total(ranks)])

    def _write(self, prompts: Sequence[Sequence[int]], seeds: Sequence[bytes]) -> list[tuple[list[Written], bytes]]:
        groups = [_Group(prompt, seed, {}) for prompt, seed in zip(prompts, seeds, strict=True)]
        try:
            self._run(groups)
        except Exception:
            self._end()
        results = []
        for group in groups:
            assert group.proofs is not None
            results.append(([group.written[number] for number in range(len(group.written))], group.proofs.result()))
        return results

    def _run(self, groups: Sequence[_Group]) -> None:
        settings = self._settings
        assert settings is not None
        waiting: dict[str, tuple[_Group, int]] = {}
        for group in groups:
            for number in range(settings.group_size):
                self._count += 1
                name = str(self._count)
                extra = {
                    "id": name,
                    "seed": group.seed.hex(),
                    "response": number,
                    "temperature": settings.temperature,
                    "min_p": settings.min_p,
                }
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=settings.max_tokens,
                    stop_token_ids=[settings.end_token],
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={EXTRA: extra},
                )
                self._llm.add_request(name, {"prompt_token_ids": list(group.prompt)}, params)
                waiting[name] = (group, number)
        while waiting:
            done = [output for output in self._llm.step() if output.finished]
            if done:
                lines = [list(output.outputs[0].token_ids) for output in done]
                wanted = [(output.request_id, len(line)) for output, line in zip(done, lines, strict=True)]
                (found, *_) = self._llm.collective_rpc("farflung_take", args=(wanted,))
                for output, line, (tokens, logprobs, states) in zip(done, lines, found, strict=True):
                    if tokens != line:
                        raise LocalError("vLLM took other tokens than the protocol's sampler chose")
                    group, number = waiting.pop(output.request_id)
                    group.written[number] = Written(
                        tokens=tokens,
                        logprobs=micro(torch.tensor(logprobs)).tolist(),
                        finish=settings.finish(line),
                        states=states,
                    )
                    if len(group.written) == settings.group_size:
                        ordered = [group.written[number] for number in range(settings.group_size)]
                        group.proofs = self._proving.submit(lambda ordered: build_proofs([ordered])[0], ordered)

    def rewritten(self, request: CountRewritten) -> int:
        """How many places were chosen for more than once so far: prompts read in parts, and preemption."""
        count: int = self._llm.collective_rpc("farflung_rewritten")[0]
        return count

    def _end(self) -> NoReturn:
        """End the process: vLLM has failed and cannot be trusted with another call."""
        traceback.print_exc()
        os._exit(BROKEN)


if __name__ == "__main__":
    child_loop.run(lambda: child_loop.methods(VllmEngine()))
