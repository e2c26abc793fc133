"""A child that generates with vLLM as it comes, for ``tests.bench.learning_generation``: no sampler, no proofs."""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct

from node.workers import child_loop
from node.workers.frames import ChildRequest
from protocol.work.rollout import unpack


class ConfigureBare(ChildRequest[None], frozen=True, tag="configure"):
    """Load the Hugging Face folder ``model`` in float32."""

    model: str
    longest: int
    eager: bool
    sequences: int


class BareWritten(Struct, frozen=True):
    """How many tokens, in how many seconds."""

    tokens: int
    seconds: float


class GenerateBare(ChildRequest[BareWritten], frozen=True, tag="generate"):
    """``size`` responses of up to ``tokens`` for each prompt."""

    prompts: list[bytes]
    size: int
    tokens: int
    end: int


class Bare:
    """vLLM's own class for offline use, with its own sampler."""

    def __init__(self) -> None:
        self._llm: Any = None

    def configure(self, request: ConfigureBare) -> None:
        """Load the model."""
        from vllm import LLM

        self._llm = LLM(
            model=request.model,
            dtype="float32",
            max_model_len=request.longest,
            max_num_seqs=request.sequences,
            enforce_eager=request.eager,
            generation_config="vllm",
            disable_log_stats=True,
        )

    def generate(self, request: GenerateBare) -> BareWritten:
        """Write the responses."""
        from vllm import SamplingParams

        params = SamplingParams(
            n=request.size,
            temperature=1.0,
            max_tokens=request.tokens,
            stop_token_ids=[request.end],
            ignore_eos=True,
            detokenize=False,
        )
        begun = time.perf_counter()
        made = self._llm.generate(
            [{"prompt_token_ids": list(unpack(line))} for line in request.prompts], params, use_tqdm=False
        )
        seconds = time.perf_counter() - begun
        return BareWritten(sum(len(one.token_ids) for group in made for one in group.outputs), seconds)


def operations() -> list[child_loop.Operation]:
    """Over one fresh state."""
    bare = Bare()
    return [bare.configure, bare.generate]


if __name__ == "__main__":
    child_loop.run(operations)
