"""Writing groups of responses with a model: the sampling half of the engine child (``node.workers.engine_child``).

1. Generation computes a prompt once and expands its cache to the group's responses; all groups of a request are decoded
   together, and finished rows leave the batch.
2. Tokens are chosen by the protocol's own noise (``proofs.sampling``), so a result depends on seed, prompt and
   weights only, not on the batch it was made in.
3. The hidden state that belongs to a token is the one whose logits chose it; activation proofs are built over each
   group's responses, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.workers.model import LanguageModel
from node.workers.model_config import ModelConfig
from proofs import activation, race, sampling
from protocol.constants import MILLION
from protocol.domain import Recipe
from protocol.work.rollout import FINISH_END, FINISH_LENGTH, MAX_LOGPROB

MAX_SEQUENCES = 512
"""Sequences decoded together: bounds the memory of caches. No influence on results."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How responses are sampled; ``temperature`` and ``min_p`` as plain numbers."""

    group_size: int
    max_prompt_tokens: int
    max_tokens: int
    temperature: float
    min_p: float
    end_token: int

    @classmethod
    def of(cls, recipe: Recipe, config: ModelConfig) -> SamplingSettings:
        """The settings that a domain's recipe prescribes for a model."""
        return cls(
            group_size=recipe.group_size,
            max_prompt_tokens=recipe.max_prompt_tokens,
            max_tokens=recipe.max_response_tokens,
            temperature=recipe.temperature / MILLION,
            min_p=recipe.min_p / MILLION,
            end_token=config.end_token,
        )

    def finish(self, tokens: Sequence[int]) -> int:
        """How a response of these tokens ended."""
        return FINISH_END if tokens[-1] == self.end_token else FINISH_LENGTH


@dataclass(frozen=True, slots=True)
class Written:
    """A generated response. ``logprobs``: −log p in micro, one a token. ``states``: [tokens, hidden], the ones that
    chose them (float32, or bfloat16 bits)."""

    tokens: list[int]
    logprobs: list[int]
    finish: int
    states: NDArray[Any]


def states_array(states: Tensor) -> NDArray[Any]:
    """Hidden states as ``proofs.activation`` takes them: float32, or bfloat16 bits as uint16."""
    states = states.cpu()
    if states.dtype == torch.bfloat16:
        return states.view(torch.int16).numpy().view(np.uint16)
    result: NDArray[Any] = states.float().numpy()
    return result


def micro(logprobs: Tensor) -> Tensor:
    """Log-probabilities (at most 0) as the protocol writes them: int64 −log p in micro."""
    return (logprobs.double() * -MILLION).round().clamp(0, MAX_LOGPROB).long()


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[bytes],
    settings: SamplingSettings,
    most: int = MAX_SEQUENCES,
) -> list[list[Written]]:
    """One group of responses for each prompt, in order; at ``most`` so many sequences are decoded together."""
    groups: list[list[Written]] = []
    step = max(1, most // settings.group_size)
    for start in range(0, len(prompts), step):
        groups += _generate(model, prompts[start : start + step], seeds[start : start + step], settings)
    return groups


def _generate(
    model: LanguageModel, prompts: Sequence[Sequence[int]], seeds: Sequence[bytes], settings: SamplingSettings
) -> list[list[Written]]:
    device, size = model.device, settings.group_size
    longest = max(len(prompt) for prompt in prompts)
    # Left padding: every row's next slot is the same one, and only the positions differ.
    tokens = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    slots = torch.arange(longest, device=device)
    real = slots >= (longest - lengths)[:, None]
    causal = slots[:, None] >= slots
    mask = (causal & real[:, None, :]) | torch.eye(longest, dtype=torch.bool, device=device)
    cache = model.cache(len(prompts), longest)
    positions = (slots - (longest - lengths)[:, None]).clamp(min=0)
    hidden = model(tokens, positions, mask[:, None], cache)[:, -1]

    live = torch.arange(len(prompts) * size, device=device)  # numbers of the sequences still being written
    group = live // size
    capacity = longest + settings.max_tokens - 1
    cache, hidden, real, lengths = cache.take(group, capacity), hidden[group], real[group], lengths[group]
    chosen = torch.zeros((len(live), settings.max_tokens), dtype=torch.int64, device=device)
    logprobs = torch.zeros((len(live), settings.max_tokens), device=device)
    states = torch.zeros((len(live), settings.max_tokens, hidden.shape[1]), dtype=hidden.dtype, device=device)
    counts = torch.full((len(live),), settings.max_tokens, device=device)
    for position in range(settings.max_tokens):
        logits = model.logits(hidden)
        places = ((seeds[number // size], number % size, position) for number in live.tolist())
        keys = sampling.keys_tensor(places).to(device)
        token, logprob = race.sample(logits, keys, settings.temperature, settings.min_p)
        chosen[live, position] = token
        logprobs[live, position] = logprob
        states[live, position] = hidden
        going = (token != settings.end_token).nonzero()[:, 0]
        counts[live[token == settings.end_token]] = position + 1
        if position + 1 == settings.max_tokens or not len(going):
            break
        if len(going) < len(live):
            live, token, real, lengths = live[going], token[going], real[going], lengths[going]
            cache = cache.take(going, capacity)
        real = torch.cat((real, real.new_ones((len(live), 1))), dim=1)
        hidden = model(token[:, None], (lengths + position)[:, None], real[:, None, None, :], cache)[:, 0]

    scores = micro(logprobs)
    groups: list[list[Written]] = []
    for number, count in enumerate(counts.tolist()):
        line = chosen[number, :count].tolist()
        if number % size == 0:
            groups.append([])
        groups[-1].append(
            Written(
                tokens=line,
                logprobs=scores[number, :count].tolist(),
                finish=settings.finish(line),
                states=states_array(states[number, :count]),
            )
        )
    return groups


def build_proofs(groups: Sequence[Sequence[Written]]) -> list[bytes]:
    """The activation proofs of each group's concatenated responses."""
    return activation.build_many([np.concatenate([response.states for response in group]) for group in groups])
