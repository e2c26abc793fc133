"""What sampler and proofs cost beside bare vLLM: ``python -m tests.bench.learning_generation MODEL_FOLDER [--json]``.

``ours``, ``bare``   response tokens a second of the engine child (tokens, log-probabilities and proofs ready to send)
                     and of vLLM as it comes, with its own sampler: medians over the pairs
``ratio``            the median of the pairs' ratios: at least 0.95 is the aim

Both children hold the model in float32 all the time and take turns on the same prompts, with the same limits and end
token; which one begins alternates. Bare vLLM runs as its own class for offline use sets it up: engine core and worker
are processes of their own. ``--compiled`` lets it compile the model (minutes), else both dispatch each operation.
A number from a busy machine says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.starter.defaults import RECIPE
from node.workers.architectures import convert
from node.workers.child_messages import (
    ClaimedGroup,
    ConfigureEngine,
    ConvertedModel,
    ConvertModel,
    EncodePrompts,
    GenerateGroups,
    LoadVersion,
    ReplayGroups,
    WrittenGroups,
)
from node.workers.engine_child import TorchEngine
from proofs.checks import FLOAT32_THRESHOLDS
from protocol.domain import Recipe
from protocol.weights.manifest import Manifest
from tests.bench.bare_vllm import ConfigureBare, GenerateBare
from tests.node.workers import vllm_child

SEQUENCES = 256


def measure(
    model: Path,
    *,
    pairs: int,
    groups: int,
    size: int,
    tokens: int,
    threads: int,
    compiled: bool,
    ready: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Run the pairs; see the module's docstring for the fields. ``ready`` is called before the first."""
    recipe = replace(RECIPE, group_size=size, max_prompt_tokens=256, max_response_tokens=tokens)
    prompts = [
        f"Explain step by step: what is {17 * n + 3} times {n + 2}, and why does the order not matter?"
        for n in range(groups)
    ]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        found = convert(ConvertModel(str(model), str(folder / "version.raw")))
        whole = (folder / "version.raw").read_bytes()
        (folder / "version.manifest").write_bytes(Manifest.of_file(found.tensors, whole, found.checksum).encode())
        ours = stack.enter_context(vllm_child.running(folder / "cache", threads=threads))
        model_ready = ours.call(ConfigureEngine(found.config, found.tokenizer, recipe, threads=threads))
        assert vllm_child.load(ours, folder) == found.checksum
        extra = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        }
        bare = stack.enter_context(
            vllm_child.running(folder / "cache", "tests.bench.bare_vllm", threads=threads, extra=extra)
        )
        bare.call(ConfigureBare(str(model), 256 + tokens, not compiled, SEQUENCES))
        lines = ours.call(EncodePrompts(prompts))

        def run_ours(number: int) -> float:
            seeds = [(number * groups + n).to_bytes(32, "big") for n in range(groups)]
            made = ours.call(GenerateGroups(prompts, seeds))
            if number == 0:
                check(found, folder, recipe, made, seeds)
            return made.tokens / made.seconds

        def run_bare() -> float:
            made = bare.call(GenerateBare(lines, size, tokens, model_ready.end_token))
            return made.tokens / made.seconds

        ready()
        rates: list[tuple[float, float]] = []
        for number in range(pairs + 1):  # the first pays for set-up and is thrown away
            if number % 2:
                one = run_ours(number)
                rates.append((one, run_bare()))
            else:
                other = run_bare()
                rates.append((run_ours(number), other))
        rates = rates[1:]
    return {
        "ours": round(statistics.median(one for one, _ in rates), 1),
        "bare": round(statistics.median(other for _, other in rates), 1),
        "ratio": round(statistics.median(one / other for one, other in rates), 3),
        "pairs": [[round(one, 1), round(other, 1)] for one, other in rates],
        "groups": groups,
        "group_size": size,
        "response_tokens": tokens,
        "threads": threads,
        "bare_compiled": compiled,
    }


def check(found: ConvertedModel, folder: Path, recipe: Recipe, made: WrittenGroups, seeds: list[bytes]) -> None:
    """The first group replays on torch without one other token: what is timed is the real thing."""
    torch_engine = TorchEngine()
    torch_engine.configure(ConfigureEngine(found.config, found.tokenizer, recipe))
    torch_engine.load(LoadVersion(str(folder / "version.manifest"), str(folder / "version.raw")))
    group = made.groups[0]
    claim = ClaimedGroup(seeds[0], group.prompt, [(one.tokens, one.logprobs) for one in group.responses], group.proofs)
    (replayed,) = torch_engine.replay(ReplayGroups([claim], FLOAT32_THRESHOLDS.deficit_clip))
    other, values = replayed.found.mismatches, replayed.found.activation_values
    if other or not values or replayed.found.activation_mismatches:
        raise SystemExit(
            f"the replay found {other} other tokens and {replayed.found.activation_mismatches} activations"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    result = measure(
        asked.model,
        pairs=asked.pairs,
        groups=asked.groups,
        size=asked.size,
        tokens=asked.tokens,
        threads=asked.threads,
        compiled=asked.compiled,
    )
    if asked.json:
        print(json.dumps(result))
    else:
        print(f"ours {result['ours']} tokens/s, bare vLLM {result['bare']} tokens/s, ratio {result['ratio']}")


if __name__ == "__main__":
    main()
