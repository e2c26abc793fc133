"""A trainer's files: the version that a step made, and the checkpoint from which the next one goes on.

1. The checkpoint (safetensors) holds the float32 masters and Adam's moments, and names the version it belongs to by
   its checksum. Loading the version and its checkpoint continues bit for bit as if the child had never ended.
2. Both files are written beside their destination and renamed, the checkpoint first: a version never lacks the state
   that made it.
3. One tensor is whole in memory at a time, however many processes share the model. Rank 0 writes, the others hand over
   their slices; each reads only its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from node.errors import UserError
from node.workers import weight_files
from node.workers.child_messages import TensorRow
from node.workers.learner import Learner
from proofs.checksum import value_checksum


def write(
    learner: Learner, dtypes: Mapping[str, torch.dtype], output: Path, checkpoint: Path
) -> tuple[list[TensorRow], int]:
    """Write what ``learner`` holds as a version with ``dtypes``, in their order, and as a checkpoint.

    Returns the version's layout and checksum on rank 0, and zeros elsewhere.
    """
    parameters = learner.parameters()
    published = {name: parameters[name] for name in dtypes}
    state = learner.state()
    if not learner.group.first:
        for _ in chain(learner.whole(published), learner.whole(state)):
            pass
        return [], 0
    with weight_files.replacing(output) as version:

        def written() -> Iterator[Tensor]:
            for tensor, dtype in zip(learner.whole(published), dtypes.values(), strict=True):
                rounded = tensor.to(dtype)
                weight_files.write_tensor(rounded, version)
                yield rounded

        checksum = value_checksum(written())
        described = {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}
        metadata = {"checksum": str(checksum), "updates": str(learner.updates)}
        with weight_files.replacing(checkpoint) as file:
            weight_files.write_safetensors(file, described, learner.whole(state), metadata)
    return [weight_files.row(name, dtype, published[name].shape) for name, dtype in dtypes.items()], checksum


def restore(learner: Learner, path: Path, checksum: int) -> None:
    """Restore the learner's state. Raises ``UserError`` where the file is damaged or belongs to another version."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("checksum") != str(checksum):
                raise UserError(f"the checkpoint {path} belongs to another version of the weights")

            def read(name: str) -> Tensor:
                part = file.get_slice(name)
                start, stop = learner.group.bounds(part.get_shape()[0])
                found: Tensor = part[start:stop]
                return found

            learner.restore(int(metadata["updates"]), read)
    except (OSError, SafetensorError, LookupError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot read the checkpoint {path}: {error}") from None
