"""A child that generates with vLLM as it comes, for ``tests.bench.learning_generation``: no sampler, no proofs."""

from __future__ import annotations

import time
from typing import Any

from node.workers import child_loop
from protocol.work.rollout import unpack


class Bare:
    """vLLM's own class for offline use, with its own sampler."""

    def __init__(self) -> None:
        self._llm: Any = None

    def configure(self, model: str, longest: int, eager: bool, sequences: int) -> dict[str, Any]:
        """Load the Hugging Face folder ``model`` in float32."""
        from vllm import LLM

        self._llm = LLM(
            model=model,
            dtype="float32",
            max_model_len=longest,
            max_num_seqs=sequences,
            enforce_eager=eager,
            generation_config="vllm",
            disable_log_stats=True,
        )
        return {}

    def generate(self, prompts: list[bytes], size: int, tokens: int, end: int) -> dict[str, Any]:
        """``size`` responses for each prompt; how many tokens, in how many seconds."""
        from vllm import SamplingParams

        params = SamplingParams(
            n=size,
            temperature=1.0,
            max_tokens=tokens,
            stop_token_ids=[end],
            ignore_eos=True,
            detokenize=False,
        )
        begun = time.perf_counter()
        made = self._llm.generate(
            [{"prompt_token_ids": list(unpack(line))} for line in prompts], params, use_tqdm=False
        )
        seconds = time.perf_counter() - begun
        return {"tokens": sum(len(one.token_ids) for group in made for one in group.outputs), "seconds": seconds}


def operations() -> dict[str, child_loop.Operation]:
    """Over one fresh state."""
    bare = Bare()
    return {"configure": bare.configure, "generate": bare.generate}


if __name__ == "__main__":
    child_loop.run(operations)
