"""The trainer child: one step of asynchronous GRPO makes the next version of the weights.

1. Master weights and the optimizer are float32; what is published has the dtypes of the manifest that was loaded.
2. A loss or gradient that is not finite stops the step: nothing is written, the answer says why, and the child refuses
   to train until the last good version is loaded again.
3. It computes on a GPU where there is one (``node.workers.architectures``), one process or many.
4. Run as ``python -P -m node.workers.trainer_child FD`` it is one process; with ``FD FOLDER``, started through
   torchrun, it is one rank of several. Rank 0 answers the daemon, and every rank does what rank 0 is asked to
   (``sharding``).
5. A step writes two files: the version that it made, and the checkpoint from which the next one goes on. The checkpoint
   (safetensors) holds the float32 masters and Adam's moments, and names the version it belongs to by its checksum.
   Loading the version and its checkpoint continues bit for bit as if the child had never ended.
6. Both files are written beside their destination and renamed, the checkpoint first: a version never lacks the state
   that made it. One tensor is whole in memory at a time, however many processes share the model. Rank 0 writes, the
   others hand over their slices; each reads only its own.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from node.errors import UserError
from node.workers import child_loop, sharding, weight_files
from node.workers.architectures import chosen, read_config
from node.workers.child_messages import (
    AUTO,
    ConfigureTrainer,
    LoadTraining,
    TensorRow,
    Trained,
    TrainerReady,
    TrainingStopped,
    TrainStep,
)
from node.workers.frames import ChildRequest
from node.workers.learner import Learner, TrainingSample, activation_bytes, make_policy, samples_of
from node.workers.model import parameter_count
from node.workers.policy import TrainedPolicy
from node.workers.sharding import Ranks
from proofs.checksum import value_checksum
from protocol.domain import Recipe
from protocol.errors import LocalError, PeerError
from protocol.weights.manifest import Manifest
from protocol.work.rollout import Submission

_EXPECTED = (UserError, LocalError)
"""What every rank raises alike."""
MEMORY_SHARE = 4
"""One part in so many of the memory may hold activations; beyond, they are computed again."""


class Trainer:
    """The child's state; its public methods are operations. Where ``group`` is None the process is alone."""

    def __init__(self, group: Ranks | None = None) -> None:
        self._group = group
        self._recipe: Recipe | None = None
        self._make: partial[TrainedPolicy] | None = None
        """Makes a policy, in the dtype in which the domain computes."""
        self._policy: TrainedPolicy | None = None
        self._learner: Learner | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._reference: Callable[[], TrainedPolicy] | None = None
        """Makes the policy of version 0."""

    def configure(self, request: ConfigureTrainer) -> TrainerReady:
        """Read the model's configuration and make the policy."""
        torch.set_num_threads(request.threads)
        config, dtype = read_config(Path(request.config)), sharding.DTYPES[request.dtype]
        if self._group is None:
            self._group = sharding.alone(chosen(request.device), sharded=dtype is not torch.float32)
        self._learner = self._policy = None
        self._recipe, self._make = request.recipe, partial(make_policy, config, request.recipe, self._group, dtype)
        self._policy = self._make()
        needed = activation_bytes(config, self._group.device, dtype)
        short = needed * MEMORY_SHARE > _memory(self._group.device)
        again = request.recompute == "on" or (request.recompute == "auto" and short)
        self._policy.model.recompute = again
        return TrainerReady(parameter_count(self._policy.model), self._group.size, again)

    def load(self, request: LoadTraining) -> int:
        """Load a version, and the checkpoint that goes with it where there is one; answers the version's checksum."""
        group, policy, recipe, make = self._group, self._policy, self._recipe, self._make
        if group is None or policy is None or recipe is None or make is None:
            raise LocalError("configure comes before load")
        self._learner = None
        policy.zero_grad(set_to_none=True)  # a step that failed left some
        described = _load(group, policy, request.manifest, request.weights)
        checksum = group.checksum(policy.model.parameters())
        # In the manifest's order: the next version is written in the same one.
        self._dtypes = {info.name: weight_files.DTYPES[info.dtype] for info in described.tensors}
        self._reference = None if request.reference is None else partial(_reference, group, make, *request.reference)
        learner = Learner(policy, recipe, group)
        if request.checkpoint is not None:
            checkpoint = Path(request.checkpoint)
            group.together(lambda: restore_checkpoint(learner, checkpoint, checksum))
        self._learner = learner
        return checksum

    def train(self, request: TrainStep) -> Trained | TrainingStopped:
        """One step over the submissions in these files (rule 2)."""
        learner, recipe, group = self._learner, self._recipe, self._group
        if learner is None or recipe is None or group is None:
            raise LocalError("the trainer has no version loaded: after an error the last good one must be loaded again")
        samples = group.together(lambda: read_samples(request.submissions, recipe))
        if recipe.kl and self._reference is None:
            raise LocalError("the recipe has a KL term, and no reference was loaded")
        self._learner = None  # until the step has succeeded
        try:
            metrics = learner.train(samples, self._reference)
        except FloatingPointError as error:
            return TrainingStopped(str(error))
        layout, checksum = write_files(learner, self._dtypes, Path(request.output), Path(request.checkpoint))
        self._learner = learner
        return Trained(metrics, int(metrics["trained"]), int(metrics["tokens"]), layout, checksum)


def _reference(group: Ranks, make: partial[TrainedPolicy], manifest: str, weights: str) -> TrainedPolicy:
    made = make(frozen=True)
    _load(group, made, manifest, weights)
    return made


def _load(group: Ranks, policy: TrainedPolicy, manifest: str, weights: str) -> Manifest:
    """Load a version, given the paths of its manifest and whole file, on every rank; its manifest."""
    described = group.together(lambda: weight_files.read_manifest(Path(manifest)))
    group.together(lambda: _fill(group, policy, weight_files.map_whole(described, Path(weights))))
    return described


def _fill(group: Ranks, policy: TrainedPolicy, tensors: Mapping[str, Tensor]) -> None:
    weight_files.check_fit(policy.model, tensors)
    for name, parameter in policy.model.named_parameters():
        group.fill(parameter, tensors[name])


def _memory(device: torch.device) -> int:
    """Bytes of memory where the device computes."""
    if device.type == "cuda":
        total: int = torch.cuda.mem_get_info(device)[1]
        return total
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_submission(path: Path, recipe: Recipe) -> Submission:
    """A verified submission's file. Raises ``UserError`` where it cannot be read (the store then lost or altered
    it)."""
    try:
        return Submission.parse(path.read_bytes(), recipe)
    except (OSError, PeerError) as error:
        raise UserError(f"cannot read the submission {path}: {error}") from None


def read_samples(paths: Sequence[str], recipe: Recipe) -> list[TrainingSample]:
    """The samples of the submissions in these files, in their order. Raises ``UserError``."""
    return [sample for path in paths for sample in samples_of(read_submission(Path(path), recipe), recipe)]


# The files of a step (rules 5 and 6)


def write_files(
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


def restore_checkpoint(learner: Learner, path: Path, checksum: int) -> None:
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


# One rank of several


def _shared(group: Ranks, operation: child_loop.Operation, request: ChildRequest[Any]) -> object:
    """Rank 0's form of an operation: the others do the same. After a surprise the ranks are out of step."""
    try:
        group.broadcast(request)
        return operation(request)
    except _EXPECTED:
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Serve until the socket closes; see rule 4."""
    if len(arguments) == 1:
        child_loop.run(lambda: child_loop.methods(Trainer()), arguments)
        return
    connection = child_loop.connect(int(arguments[0]))
    group = sharding.join(Path(arguments[1]), chosen(AUTO))
    table = child_loop.table(child_loop.methods(Trainer(group)))
    if group.first:
        with suppress(OSError):
            child_loop.serve({kind: partial(_shared, group, each) for kind, each in table.items()}, connection)
        return
    while True:
        request = group.broadcast(None)
        with suppress(*_EXPECTED):
            table[type(request)](request)


if __name__ == "__main__":
    main(sys.argv[1:])
