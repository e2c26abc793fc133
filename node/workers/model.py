"""A small causal language model of the Llama, Mistral, Qwen2 and Qwen3 family, in plain torch.

It uses Hugging Face's tensor names (and its ``config.json``: ``node.workers.model_config``), so published checkpoints
load unchanged: RMSNorm, rotary positions (plain, linear or Llama 3's), grouped-query attention, SwiGLU, optional
biases, norms on queries and keys (Qwen3), optionally tied embeddings. Architecture: https://arxiv.org/abs/2302.13971,
https://arxiv.org/abs/2310.06825, https://arxiv.org/abs/2407.10671 and https://arxiv.org/abs/2505.09388.

What a query may attend to is said by a boolean mask and where it stands by explicit positions, so the model itself
knows nothing of padding, packing or shared prompts (``node.workers.row_layout`` does).

Shape letters: B rows, S slots of a row, K key slots, H hidden size, N heads, G key-value heads, D head size, V
vocabulary.
"""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from node.workers.model_config import ModelConfig, Scaling


class Cache:
    """Keys and values of the slots seen so far: for each layer two tensors [B, G, capacity, D]."""

    def __init__(
        self, config: ModelConfig, rows: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (rows, config.key_value_heads, capacity, config.head_size)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new slots' [B, G, S, D] behind the ``length`` known ones and return all of them."""
        end = self.length + keys.shape[2]
        self.keys[layer][:, :, self.length : end] = keys
        self.values[layer][:, :, self.length : end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def take(self, rows: Tensor, capacity: int) -> Cache:
        """A cache of the given rows (indices, repeats allowed) with room for ``capacity`` slots."""
        other = object.__new__(Cache)
        other.length = self.length
        for name in ("keys", "values"):
            moved = []
            for tensor in getattr(self, name):
                room = tensor.new_zeros((len(rows), tensor.shape[1], capacity, tensor.shape[3]))
                room[:, :, : self.length] = tensor[rows, :, : self.length]
                moved.append(room)
            setattr(other, name, moved)
        return other


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in fp32 whatever the input's dtype."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → [..., size]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


def _stretched(frequencies: Tensor, scaling: Scaling | None) -> Tensor:
    """The rotary frequencies as ``scaling`` has them. Llama 3's rule: https://arxiv.org/abs/2407.21783 and its code."""
    if scaling is None:
        return frequencies
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original * frequencies / (2 * math.pi)  # how often a wave turns within the original context
    keep = ((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * slow


def rotary_angles(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, S, D] of the rotary embedding at integer ``positions`` [B, S]."""
    exponents = torch.arange(0, config.head_size, 2, device=positions.device, dtype=torch.float32) / config.head_size
    angles = positions[:, :, None].float() * _stretched(config.rope_theta**-exponents, config.scaling)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-high, low), dim=-1) * sine


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        inner, shared = config.heads * config.head_size, config.key_value_heads * config.head_size
        self.grouped = config.heads != config.key_value_heads
        self.q_proj = nn.Linear(config.hidden, inner, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, shared, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, shared, bias=config.qkv_bias)
        self.o_proj = nn.Linear(inner, config.hidden, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_size, config.norm_epsilon) if config.head_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_size, config.norm_epsilon) if config.head_norm else nn.Identity()

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None, layer: int
    ) -> Tensor:
        """x [B, S, H], mask [B, 1, S, K] or None → [B, S, H]."""
        query = _rotate(self.q_norm(self._heads(self.q_proj(x))), *angles)
        key = _rotate(self.k_norm(self._heads(self.k_proj(x))), *angles)
        value = self._heads(self.v_proj(x))
        if cache is not None:
            key, value = cache.extend(layer, key, value)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.grouped
        )
        result: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_epsilon)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None, layer: int
    ) -> Tensor:
        """x [B, S, H] → [B, S, H]."""
        x = x + self.self_attn(self.input_layernorm(x), angles, mask, cache, layer)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_epsilon)


class LanguageModel(nn.Module, abc.ABC):
    """What generation, replay and training ask of a model. Its parameters have Hugging Face's names.

    With ``recompute`` a layer keeps its input only for the backward pass, and computes what is inside again. Logits are
    c · tanh((hidden · headᵀ + head_bias) / c) with the ``soft_cap`` c; without one, what is in the inner brackets.
    """

    soft_cap: float | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False

    @property
    @abc.abstractmethod
    def layers(self) -> nn.ModuleList:
        """The layers, in order."""

    def shorten(self, kept: int) -> None:
        """Leave out all but the first ``kept`` layers."""
        del self.layers[kept:]

    @property
    @abc.abstractmethod
    def embeddings(self) -> Tensor:
        """The input embeddings [V, H]."""

    @property
    @abc.abstractmethod
    def head(self) -> Tensor:
        """The output projection [V, H]."""

    @property
    def head_bias(self) -> Tensor | None:
        """What is added to the logits [V], if anything."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        return self.embeddings.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embeddings.device

    @abc.abstractmethod
    def cache(self, rows: int, capacity: int) -> Any:
        """An empty cache for ``rows`` rows of ``capacity`` slots, with a method ``take`` like ``Cache``'s."""

    @abc.abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        """The final-norm hidden states [B, S, H] of integer ``tokens`` [B, S] at ``positions`` [B, S].

        ``mask`` [B, 1, S, K] is True where a slot may attend to a key slot; every slot needs at least one. With a
        ``cache``, K counts its slots and the new ones behind them, and the cache is extended. None, without a cache
        only, lets each slot attend to itself and to those before it, and takes no memory that grows with S².
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in fp32 of final-norm hidden states [..., H]."""
        return capped(functional.linear(hidden, self.head, self.head_bias).float(), self.soft_cap)


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Logits [..., V] below a soft cap, where there is one."""
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


class CausalLM(LanguageModel):
    """The whole model. Its ``state_dict`` has Hugging Face's names; a tied model has no ``lm_head.weight``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = None if config.tied else nn.Linear(config.hidden, config.vocabulary, bias=False)

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, in order."""
        return self.model.layers

    @property
    def embeddings(self) -> Tensor:
        """The input embeddings [V, H]."""
        return self.model.embed_tokens.weight

    def cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache with room for all slots."""
        return Cache(self.config, rows, capacity, dtype=self.dtype, device=self.device)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None = None) -> Tensor:
        """See ``LanguageModel.forward``."""
        angles = rotary_angles(self.config, positions)
        angles = (angles[0].to(self.dtype), angles[1].to(self.dtype))
        x = self.model.embed_tokens(tokens)
        for number, layer in enumerate(self.model.layers):
            if self.recompute and torch.is_grad_enabled():
                # nothing here is random, so there is no state of a generator to keep
                x = checkpoint(layer, x, angles, mask, cache, number, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, angles, mask, cache, number)
        if cache is not None:
            cache.length += tokens.shape[1]
        result: Tensor = self.model.norm(x)
        return result

    @property
    def head(self) -> Tensor:
        """The output projection [V, H]."""
        return self.embeddings if self.lm_head is None else self.lm_head.weight


def parameter_count(model: nn.Module) -> int:
    """How many values the model's parameters hold, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
