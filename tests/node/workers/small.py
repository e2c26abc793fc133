"""Small random models and groups for the tests of the torch workers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from node.starter.defaults import RECIPE
from node.workers import sharding
from node.workers.engine_child import Claim
from node.workers.generation import SamplingSettings, Written, build_proofs, generate
from node.workers.learner import Learner, TrainingSample
from node.workers.model import CausalLM, LanguageModel
from node.workers.model_config import ModelConfig, read_config
from node.workers.policy import TrainedPolicy
from node.workers.weight_files import checksum, layout, write_whole
from protocol.constants import MILLION
from protocol.domain import Recipe
from protocol.weights.manifest import Manifest

STARTER = Path(__file__).resolve().parents[3] / "node" / "starter"
SETTINGS = SamplingSettings(group_size=4, max_prompt_tokens=64, max_tokens=6, temperature=1.0, min_p=0.0, end_token=1)

RECIPE_SMALL = replace(
    RECIPE,
    group_size=4,
    groups_per_submission=3,
    max_response_tokens=6,
    learning_rate=10**9,  # 1e-3
    warmup_steps=3,
    weight_decay=10_000,
    grad_clip=1_000_000,
    inner_steps=2,
)

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
LLAMA = {**QWEN, "model_type": "llama", "tie_word_embeddings": True, "head_dim": 12, "num_key_value_heads": 4}


def write_config(path: Path, raw: dict[str, Any]) -> Path:
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


def config(directory: Path, raw: dict[str, Any] = QWEN) -> ModelConfig:
    return read_config(write_config(directory / "config.json", raw))


def model(config: ModelConfig, seed: int = 0) -> CausalLM:
    """A model whose every tensor is random, norms and biases too, so that none can be forgotten unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    made = CausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + (parameter.dim() == 1))
    return made


def prompts(config: ModelConfig, count: int, seed: int = 0, *, longest: int = 12) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(2, config.vocabulary) for _ in range(generator.randint(1, longest))] for _ in range(count)
    ]


def seeds(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def claims(prompts: list[list[int]], seeds: list[bytes], groups: list[list[Written]]) -> list[Claim]:
    """What an honest author claims of the groups it wrote."""
    return [
        Claim(seed, prompt, [one.tokens for one in group], [one.logprobs for one in group], proofs)
        for seed, prompt, group, proofs in zip(seeds, prompts, groups, build_proofs(groups), strict=True)
    ]


def written(made: LanguageModel, prompts: list[list[int]], settings: SamplingSettings = SETTINGS) -> list[Claim]:
    """Honest claims of one group a prompt."""
    noise = seeds(len(prompts))
    return claims(prompts, noise, generate(made, prompts, noise, settings))


def samples(made: CausalLM, count: int, seed: int = 0) -> list[TrainingSample]:
    """Honest rollouts of ``made``, rewarded for even tokens."""
    return [
        TrainingSample(
            claim.prompt,
            claim.responses,
            claim.logprobs,
            [10**6 * sum(token % 2 == 0 for token in line) // len(line) for line in claim.responses],
        )
        for claim in written(made, prompts(made.config, count, seed))
    ]


def learner(made: CausalLM, recipe: Recipe) -> Learner:
    """A learner of ``made`` in this process alone."""
    return Learner(TrainedPolicy(made, recipe.temperature / MILLION), recipe, sharding.alone("cpu", sharded=False))


def store(
    made: CausalLM, directory: Path, name: str = "version", dtype: torch.dtype = torch.float32
) -> tuple[Path, Path]:
    """Write a version's manifest and whole file; returns their paths."""
    tensors = {key: value.detach().to(dtype) for key, value in sorted(made.named_parameters())}
    whole, manifest = directory / f"{name}.raw", directory / f"{name}.manifest"
    write_whole(tensors.values(), whole)
    rounded = CausalLM(made.config)
    with torch.no_grad():
        for key, value in rounded.named_parameters():
            value.copy_(tensors[key])
    described = Manifest.of_file(layout(tensors), whole.read_bytes(), checksum(rounded))
    manifest.write_bytes(described.encode())
    return manifest, whole
