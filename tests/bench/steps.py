"""Real optimizer steps on a given model, for measuring what deltas of them cost.

``python -m tests.bench.steps MODEL OUT --rate 1e-6 --steps 8`` loads the Hugging Face directory MODEL, takes AdamW
steps on float32 masters as ``node.workers.trainer_child`` does, and writes the published bf16 weights before the first
and after some of the steps as ``OUT/<steps>.bin``, with ``OUT/layout.json``.

1. The masters are aged: within each weight's rounding interval a master stands anywhere with the same probability, as
   after a long run. Fresh ones stand in the middle, and no small step could move a weight to its neighbour.
2. The moments are warm: so many steps are taken before the first version is written.
3. The gradient is a policy's: log-probabilities of given text, weighted by advantages of mean 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from node.workers import weight_files
from node.workers.learner import BETAS
from node.workers.model import CausalLM
from node.workers.model_config import read_config
from proofs.checksum import value_checksum

ROWS: Final = 2
SLOTS: Final = 48
WARM: Final = 8
TEXTS: Final = Path(__file__).resolve().parents[2] / "docs"


@torch.no_grad()
def age(master: Tensor, chance: torch.Generator) -> Tensor:
    """``master``, on the grid of bfloat16, moved at random within what rounds to the same."""
    _, exponent = torch.frexp(master)
    spacing = torch.ldexp(torch.ones_like(master), exponent - 8)
    moved = master + (torch.rand(master.shape, generator=chance) - 0.5) * spacing
    # Below a power of two the interval is narrower; there, and at 0, a master stays where it is.
    return torch.where((moved.bfloat16() == master.bfloat16()) & (master != 0), moved, master)


def batches(tokenizer: Tokenizer) -> list[Tensor]:
    """Token ids [ROWS, SLOTS] of the project's own documents."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.md")))
    ids = torch.tensor(tokenizer.encode(text).ids)
    count = len(ids) // (ROWS * SLOTS)
    return list(ids[: count * ROWS * SLOTS].view(count, ROWS, SLOTS))


def take_steps(source: Path, out: Path, rate: float, wanted: set[int]) -> None:
    """Write the versions ``wanted`` (numbers of steps behind version 0)."""
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_flush_denormal(True)  # the squares of tiny gradients are denormal, and hundreds of times as slow
    chance = torch.Generator().manual_seed(1)
    config = read_config(source / "config.json")
    tensors = weight_files.read_safetensors(source)
    if config.tied:
        tensors.pop("lm_head.weight", None)
    model = CausalLM(config)
    weight_files.load_into(model, tensors)
    names = list(tensors)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data = age(parameter.data.bfloat16().float(), chance)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)
    texts = batches(Tokenizer.from_file(str(source / "tokenizer.json")))
    positions = torch.arange(SLOTS).expand(ROWS, SLOTS)
    mask = torch.ones(SLOTS, SLOTS, dtype=torch.bool).tril().expand(ROWS, 1, SLOTS, SLOTS)
    out.mkdir(parents=True, exist_ok=True)
    for step in range(WARM + max(wanted) + 1):
        if step - WARM in wanted:
            published = {name: parameters[name].detach().bfloat16() for name in names}
            weight_files.write_whole(published.values(), out / f"{step - WARM}.bin")
            rows = {"tensors": weight_files.layout(published), "checksum": value_checksum(published.values())}
            (out / "layout.json").write_text(json.dumps(rows))
        tokens = texts[step % len(texts)]
        logits = model.logits(model(tokens, positions, mask))[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]
        advantages = torch.randn(ROWS, 1, generator=chance)
        loss = -((advantages - advantages.mean()) * logprobs).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step - WARM}", file=sys.stderr, flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Write versions of real optimizer steps.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 1, 8])
    arguments = parser.parse_args()
    take_steps(arguments.model, arguments.out, arguments.rate, set(arguments.steps))


if __name__ == "__main__":
    main()
