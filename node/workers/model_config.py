"""What a Hugging Face ``config.json`` says of a model that is implemented here (``node.workers.model``). No torch.

``node.workers.architectures`` reads those of other models as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.errors import UserError

ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` that are implemented here."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How rotary frequencies are stretched for long contexts: all by ``factor`` ("linear"), or ("llama3") only those
    whose wave is long beside ``original`` positions, with a smooth passage between the two ``*_factor``."""

    kind: str
    factor: float
    low_factor: float = 1.0
    high_factor: float = 4.0
    original: int = 8192

    @classmethod
    def of(cls, rope: dict[str, Any]) -> Scaling | None:
        """The scaling of a ``rope_parameters`` or ``rope_scaling`` table; raises ``LookupError`` or ``ValueError``."""
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default":
            return None
        if kind == "linear":
            return cls(kind, float(rope["factor"]))
        return cls(
            kind,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )

    def table(self) -> dict[str, Any]:
        """As it stands in a configuration."""
        found: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            found |= {
                "low_freq_factor": self.low_factor,
                "high_freq_factor": self.high_factor,
                "original_max_position_embeddings": self.original,
            }
        return found


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of a ``config.json`` that matter here. Sizes are counts; ``end_token`` ends a response.

    Of several end tokens the first counts, because audits ask for one. ``positions``, where known, is how many tokens a
    sequence may have at most. ``foreign`` is empty for a model that is implemented here, and else the JSON text from
    which another library builds it (``node.workers.transformers_model``); fields that say how a layer computes are then
    unused.
    """

    architecture: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    norm_epsilon: float
    rope_theta: float
    tied: bool
    qkv_bias: bool
    end_token: int
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    scaling: Scaling | None = None
    positions: int | None = None
    foreign: str = ""


def read_json(path: Path) -> dict[str, Any]:
    """The content of a ``config.json``. Raises ``UserError``."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read the model configuration {path}: {error}") from None


class NotOurs(UserError):
    """A configuration of another model, or with a setting that this one lacks."""


def read_config(path: Path) -> ModelConfig:
    """Read a Hugging Face configuration. Raises ``NotOurs`` for what this model cannot do, instead of ignoring it, and
    ``UserError`` for a file that is damaged."""
    raw = read_json(path)
    architecture = raw.get("model_type")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise NotOurs(f"{path}: model_type {architecture!r} is not one of {known}")
    # transformers 5 keeps the rotary settings together, earlier versions have them at the top level.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    bias = bool(raw.get("attention_bias", False)) and architecture in ("llama", "qwen3")
    window = raw.get("sliding_window") if architecture == "mistral" else None
    unsupported = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(raw.get("use_sliding_window", False)),
        "sliding_window": window is not None and window != raw.get("max_position_embeddings"),
        "rope_scaling": (rope.get("rope_type") or rope.get("type") or "default") not in ("default", "linear", "llama3"),
        "quantization_config": raw.get("quantization_config") is not None,
    }
    for name, found in unsupported.items():
        if found:
            raise NotOurs(f"{path}: this setting of {name} is not supported")
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        end = raw["eos_token_id"]
        config = ModelConfig(
            architecture=architecture,
            vocabulary=int(raw["vocab_size"]),
            hidden=hidden,
            intermediate=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_size=int(raw.get("head_dim") or hidden // heads),
            norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or bias,
            end_token=int(end[0] if isinstance(end, list) else end),
            out_bias=bias,
            mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias", False)),
            head_norm=architecture == "qwen3",
            scaling=Scaling.of(rope),
        )
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{path}: a field of the configuration is missing or wrong: {error}") from None
    if config.heads % config.key_value_heads or config.head_size % 2:
        raise UserError(f"{path}: the numbers of heads do not fit together")
    return config


def config_json(config: ModelConfig, positions: int, dtype: str) -> dict[str, Any]:
    """A Hugging Face configuration of the same model for ``positions`` positions, and nothing that is not in it."""
    scaling = {"rope_type": "default"} if config.scaling is None else config.scaling.table()
    class_name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.architecture]
    return {
        "architectures": [f"{class_name}ForCausalLM"],
        "model_type": config.architecture,
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "sliding_window": None,
        "max_position_embeddings": positions,
        "eos_token_id": config.end_token,
        "bos_token_id": None,
        "dtype": dtype,
    }
