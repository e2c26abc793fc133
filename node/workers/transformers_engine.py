"""Generation with Hugging Face transformers: a second engine, to calibrate against and to check our own with.

It shares nothing with ``node.workers.engine_child`` but the noise: layers, caches, masks and kernels are the library's.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from node.workers.generation import SamplingSettings, Written, micro, states_array
from node.workers.model import LanguageModel
from proofs import sampling


def build(model: LanguageModel, config: dict[str, Any]) -> Any:
    """The library's model for a ``config.json``'s content, with the weights and the dtype of ``model``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})
    settings.tie_word_embeddings = model.config.tied
    made = AutoModelForCausalLM.from_config(settings, dtype=model.dtype, attn_implementation="sdpa").eval()
    state = dict(model.state_dict())
    if model.config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    made.load_state_dict(state)
    return made.requires_grad_(False)


@torch.inference_mode()
def generate(
    made: Any, prompts: Sequence[Sequence[int]], seeds: Sequence[bytes], settings: SamplingSettings
) -> list[list[Written]]:
    """One group of responses for each prompt, in order; prompts of one length are one batch, so nothing is padded."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    groups: dict[int, list[Written]] = {}
    for indices in by_length.values():
        flat = _batch(made, [prompts[index] for index in indices], [seeds[index] for index in indices], settings)
        for place, index in enumerate(indices):
            groups[index] = flat[place * settings.group_size : (place + 1) * settings.group_size]
    return [groups[index] for index in range(len(prompts))]


def _batch(
    made: Any, prompts: Sequence[Sequence[int]], seeds: Sequence[bytes], settings: SamplingSettings
) -> list[Written]:
    """The responses to prompts of one length, group after group."""
    places = [(seed, number) for seed in seeds for number in range(settings.group_size)]
    size = len(places)
    tokens = torch.tensor([list(prompt) for prompt in prompts for _ in range(settings.group_size)])
    rows: list[list[int]] = [[] for _ in range(size)]
    logs: list[list[int]] = [[] for _ in range(size)]
    states: list[list[Tensor]] = [[] for _ in range(size)]
    # The name of this argument changed within version 5.
    name = "cache" if "cache" in inspect.signature(made.forward).parameters else "past_key_values"
    cache = None
    for position in range(settings.max_tokens):
        answer = made(input_ids=tokens, **{name: cache}, use_cache=True, output_hidden_states=True)
        cache = getattr(answer, name)
        logits = answer.logits[:, -1].float()
        keys = sampling.keys_tensor((seed, number, position) for seed, number in places)
        chosen = sampling.choose(logits, keys, settings.temperature, settings.min_p)
        reported = micro(sampling.logprobs(logits, chosen, settings.temperature)).tolist()
        for row, token in enumerate(chosen.tolist()):
            if not rows[row] or rows[row][-1] != settings.end_token:
                rows[row].append(token)
                logs[row].append(reported[row])
                states[row].append(answer.hidden_states[-1][row, -1])
        if all(row[-1] == settings.end_token for row in rows):
            break
        tokens = chosen[:, None]
    return [
        Written(row, log, settings.finish(row), states_array(torch.stack(kept)))
        for row, log, kept in zip(rows, logs, states, strict=True)
    ]
