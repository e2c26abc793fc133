"""Weights on disk: the raw whole file that a manifest describes, and the ways into and out of it.

1. A whole file is the raw little-endian tensors in the manifest's order, nothing else (``protocol.weights.manifest``).
   It is mapped, never read into memory at once.
2. Files are written beside their destination, flushed to disk and renamed over it, so a crash leaves the old file or
   none.
3. After loading, the checksum is taken over the *model's own* parameters, not over the file: a load that silently
   kept an old tensor then differs from the manifest's.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from node.errors import UserError
from node.workers.child_messages import TensorRow
from node.workers.model import LanguageModel
from proofs.checksum import value_checksum
from protocol.errors import PeerError
from protocol.weights.manifest import Manifest

DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def read_manifest(path: Path) -> Manifest:
    """The manifest stored in ``path``. Raises ``UserError`` where it cannot be read."""
    try:
        return Manifest.parse(path.read_bytes())
    except (OSError, PeerError) as error:
        raise UserError(f"cannot read the weight manifest {path}: {error}") from None


def map_whole(manifest: Manifest, path: Path) -> dict[str, Tensor]:
    """The tensors of the whole file ``path`` by name, mapped: private pages, nothing is written back.

    Raises ``UserError`` where the file is missing or has the wrong size. Hashes are the store's business, not checked.
    """
    if sys.byteorder != "little":
        raise UserError("weights are little-endian, and this machine is not")
    try:
        data = np.memmap(path, dtype=np.uint8, mode="c")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot map the weights {path}: {error}") from None
    if len(data) != manifest.size:
        raise UserError(f"the weights {path} have {len(data)} bytes, but the manifest says {manifest.size}")
    offsets = manifest.tensor_offsets()
    tensors: dict[str, Tensor] = {}
    for info in manifest.tensors:
        start, size = offsets[info.name]
        raw = torch.from_numpy(data[start : start + size])
        if start % 4:
            raw = raw.clone()  # a tensor behind an odd number of 16-bit values; torch reads aligned memory only
        tensors[info.name] = raw.view(DTYPES[info.dtype]).view(info.shape)
    return tensors


@torch.no_grad()
def load_into(model: LanguageModel, tensors: Mapping[str, Tensor]) -> int:
    """Copy ``tensors`` into ``model`` and return the checksum of what the model then holds; see ``check_fit``."""
    check_fit(model, tensors)
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name])
    return checksum(model)


def check_fit(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ``UserError`` unless names and shapes are exactly the model's: a version of another architecture must not
    half load."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys():
        odd = sorted(parameters.keys() ^ tensors.keys())
        raise UserError(f"the weights do not fit the model's configuration: {odd[0]} and {len(odd) - 1} more tensors")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(f"the weights do not fit the model's configuration: {name} has another shape")


def checksum(model: nn.Module) -> int:
    """The layout-independent checksum of the model's own parameters, shared ones counted once."""
    return value_checksum(parameter.detach() for parameter in model.parameters())


def layout(tensors: Mapping[str, Tensor]) -> list[TensorRow]:
    """The rows that describe ``tensors``, in their order."""
    return [row(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def row(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorRow:
    """The row that describes one tensor."""
    return name, _NAMES[dtype], tuple(shape)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that becomes ``path`` when the block ends well, and leaves nothing behind when it does not."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(FileNotFoundError):
            part.unlink()
        raise


def write_safetensors(
    file: BinaryIO,
    described: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write ``tensors`` in the order of ``described`` (dtype and shape by name), one in memory at a time.

    Format: https://github.com/huggingface/safetensors#format.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in described.items():
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors:
        write_tensor(tensor, file)


def write_tensor(tensor: Tensor, file: BinaryIO) -> None:
    """Append the raw little-endian bytes of ``tensor``."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    file.write(flat.view(torch.uint8).numpy().data)


def write_whole(tensors: Iterable[Tensor], path: Path) -> None:
    """Write ``tensors`` in order as a whole file, atomically."""
    with replacing(path) as file:
        for tensor in tensors:
            write_tensor(tensor, file)


def safetensors_files(directory: Path) -> list[Path]:
    """The ``*.safetensors`` files in ``directory``. Raises ``UserError`` where there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"there is no .safetensors file in {directory}")
    return files


def read_safetensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of the ``*.safetensors`` files in ``directory``, by name in sorted order. Raises ``UserError``."""
    tensors: dict[str, Tensor] = {}
    for path in safetensors_files(directory):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    tensors[name] = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {path}: {error}") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise UserError(f"{directory}: {name} is {tensor.dtype}; weights are float32, bfloat16 or float16")
    return dict(sorted(tensors.items()))
