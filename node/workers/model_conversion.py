"""From a Hugging Face folder to version 0 of a domain's weights, for our own architectures and for transformers'."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from node.errors import UserError
from node.workers import weight_files
from node.workers.architectures import build, read_config
from node.workers.child_messages import ConvertedModel, ConvertModel
from node.workers.model import ModelConfig
from proofs.checksum import value_checksum


def read_folder(config: ModelConfig, directory: Path) -> dict[str, Tensor]:
    """The parameters of a Hugging Face directory by the names of the model for ``config``, sorted. Raises
    ``UserError``."""
    if config.foreign:
        # Imported here: it loads a large library, which our own architectures do without.
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
