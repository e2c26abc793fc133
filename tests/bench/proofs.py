"""What proofs and audits cost: ``python -m tests.bench.proofs --model DIR [--json]``.

On one group with responses of 256 tokens: the time to build proofs as a share of generating (``build_share``), the time
to audit as a share of generating the same tokens (``audit_ratio``), the same of a whole submission of 16 groups at the
share of an established node (``audit_ratio_adaptive``), and ``proof_bytes_per_token``. The model does not end its
responses here, so that all have the same length. Medians over the runs; generation and audit take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from node.starter.defaults import RECIPE
from node.workers import forger_zoo
from node.workers.engine_child import Texts, measure
from node.workers.generation import SamplingSettings, build_proofs, generate
from node.workers.model import CausalLM
from node.workers.model_config import read_config
from node.workers.weight_files import load_into, read_safetensors
from protocol.work.schedule import MAX_TIER, audit_share, audited_count
from tests.bench.gather import CHAT

GROUPS: Final = 16
"""Groups of a submission."""
ESTABLISHED: Final = 4
"""The tier of a node with 158 submissions accepted in a row."""
QUESTION: Final = "Tell me how a lighthouse works, and why its lamp turns."


def run(model: CausalLM, prompt: list[int], settings: SamplingSettings, runs: int) -> dict[str, Any]:
    """The figures of one model."""
    made, built, audited = [], [], []
    size = tokens = 0
    with torch.inference_mode():
        model(
            torch.tensor([prompt]), torch.arange(len(prompt))[None], torch.ones(1, 1, *[len(prompt)] * 2).tril().bool()
        )
    for number in range(runs):
        job = forger_zoo.job([prompt], "bench", number)
        begun = time.perf_counter()
        written = generate(model, job.prompts, job.seeds, settings)
        generated = time.perf_counter()
        (proofs,) = build_proofs(written)
        proved = time.perf_counter()
        claims = [replace(claim, proofs=proofs) for claim in forger_zoo.claims_of(job, written)]
        looked = time.perf_counter()
        (found,) = measure(model, claims, settings)
        made.append(generated - begun)
        built.append(proved - generated)
        audited.append(time.perf_counter() - looked)
        tokens, size = len(found.deficits), len(proofs)
        assert float(found.deficits.max()) < 0.01, "an honest group was not replayed"
    ratio = statistics.median(a / g for a, g in zip(audited, made, strict=True))
    share = audited_count(GROUPS, audit_share(min(ESTABLISHED, MAX_TIER), 0)) / GROUPS
    return {
        "tokens": tokens,
        "runs": runs,
        "generate_seconds": statistics.median(made),
        "audit_seconds": statistics.median(audited),
        "build_share": statistics.median(b / g for b, g in zip(built, made, strict=True)),
        "audit_ratio": ratio,
        "audit_ratio_adaptive": ratio * share,
        "proof_bytes_per_token": size / tokens,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="SmolLM2's folder (tests/smollm2.py)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--responses", type=int, default=8, help="responses of the group")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each response")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = read_config(arguments.model / "config.json")
    model = CausalLM(config).requires_grad_(False)
    load_into(model, read_safetensors(arguments.model))
    recipe = replace(RECIPE, group_size=arguments.responses, max_prompt_tokens=128)
    settings = replace(
        SamplingSettings.of(replace(recipe, max_response_tokens=arguments.tokens), config), end_token=config.vocabulary
    )
    prompt = Texts(arguments.model / "tokenizer.json", config).encode(CHAT.format(QUESTION), 128)
    found = run(model, prompt, settings, arguments.runs)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value:.6g}")


if __name__ == "__main__":
    main()
