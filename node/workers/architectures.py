"""From a Hugging Face folder to a model that computes here.

1. Our own model (``node.workers.model``) computes where it does what the folder's ``config.json`` asks for, and
   otherwise the class that transformers has for the architecture (``node.workers.transformers_model``). That is
   imported only where it is needed: it loads a large library, which our own architectures do without.
2. It computes on a GPU where torch has one, else on the processor. The daemon imports no torch and cannot know, so each
   child decides. ``CUDA_VISIBLE_DEVICES``, which children inherit, hides GPUs from all of them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from node.errors import UserError
from node.workers import model_config, weight_files
from node.workers.child_messages import AUTO, ConvertedModel, ConvertModel
from node.workers.model import CausalLM, LanguageModel
from node.workers.model_config import ModelConfig
from proofs.checksum import value_checksum


def read_config(path: Path) -> ModelConfig:
    """Read a Hugging Face configuration. Raises ``UserError`` for a model that cannot be used, and says why."""
    raw = model_config.read_json(path)
    try:
        return model_config.read_config(path)
    except model_config.NotOurs:
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


def chosen(device: str, gpu: bool | None = None) -> str:
    """What torch calls the device that is meant: "cuda" or "cpu" for "auto", any other name as it is.

    ``gpu``: whether there is one, where that is known.
    """
    if device != AUTO:
        return device
    return "cuda" if (torch.cuda.is_available() if gpu is None else gpu) else "cpu"


def read_folder(config: ModelConfig, directory: Path) -> dict[str, Tensor]:
    """The parameters of a Hugging Face directory by the names of the model for ``config``, sorted. Raises
    ``UserError``."""
    if config.foreign:
        from node.workers import transformers_model

        return transformers_model.read_weights(config, directory)
    tensors = weight_files.read_safetensors(directory)
    if config.tied:
        tensors.pop("lm_head.weight", None)  # some files hold the embedding twice
    return tensors


def convert(request: ConvertModel) -> ConvertedModel:
    """Make version 0's whole file from a Hugging Face directory.

    For a domain that computes in another dtype than float32 the tensors are rounded to it, so that everybody loads the
    same values. The model is built and loaded once, so weights that do not fit their configuration are refused here and
    not by every node; so is a model of another library that does not compute alike in generation and in replay.
    """
    directory = Path(request.model_dir)
    config = read_config(directory / "config.json")
    tensors = read_folder(config, directory)
    if request.dtype != "float32":
        tensors = {name: tensor.to(getattr(torch, request.dtype)) for name, tensor in tensors.items()}
    model = build(config)
    value = weight_files.load_into(model, tensors)
    if value != value_checksum(tensors.values()):
        raise UserError(f"the weights in {directory} do not survive loading in float32")
    if config.foreign:
        from node.workers import transformers_model

        transformers_model.check(model)
    weight_files.write_whole(tensors.values(), Path(request.output))
    return ConvertedModel(
        tensors=weight_files.layout(tensors),
        checksum=value,
        config=str(directory / "config.json"),
        tokenizer=str(directory / "tokenizer.json"),
        architecture=config.architecture,
        positions=config.positions,
    )
