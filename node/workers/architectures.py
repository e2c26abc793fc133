"""Which model computes for a ``config.json``: our own (``node.workers.model``) where it does what the file asks for,
and otherwise the class that transformers has for the architecture (``node.workers.transformers_model``)."""

from __future__ import annotations

from pathlib import Path

import torch

from node.workers import model
from node.workers.model import CausalLM, LanguageModel, ModelConfig


def read_config(path: Path) -> ModelConfig:
    """Read a Hugging Face configuration. Raises ``UserError`` for a model that cannot be used, and says why."""
    raw = model.read_json(path)
    try:
        return model.read_config(path)
    except model.NotOurs:
        # Imported here: it loads a large library, which our own architectures do without.
        from node.workers import transformers_model

        return transformers_model.parse(raw, path)


def build(config: ModelConfig) -> LanguageModel:
    """The model, in float32 and not yet loaded; on the meta device where that is the default one.

    Raises ``UserError`` for a class of transformers that cannot be used.
    """
    if not config.foreign:
        return CausalLM(config)
    from node.workers import transformers_model

    made = transformers_model.Foreign(config)
    where = torch.get_default_device()
    return made if where.type == "meta" else made.to_empty(device=where)
