"""The trainer child: one step of asynchronous GRPO makes the next version of the weights.

1. Master weights and the optimizer are float32; what is published has the dtypes of the manifest that was loaded.
2. A loss or gradient that is not finite stops the step: nothing is written, the answer says why, and the child refuses
   to train until the last good version is loaded again.
3. It computes on a GPU where there is one (``node.workers.device``), one process or many.
4. Run as ``python -P -m node.workers.trainer_child FD`` it is one process; with ``FD FOLDER``, started through
   torchrun, it is one rank of several. Rank 0 answers the daemon, and every rank does what rank 0 is asked to
   (``sharding``).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.workers import child_loop, sharding
from node.workers import trainer_files as checkpoints
from node.workers import weight_files as weight_files
from node.workers.architectures import read_config
from node.workers.child_loop import UserError
from node.workers.device import AUTO, chosen
from node.workers.learner import Learner, Sample, activation_bytes, make_policy, samples_of
from node.workers.model import Config, parameter_count
from node.workers.policy import Policy
from node.workers.sharding import Group
from protocol.domain import Recipe
from protocol.errors import LocalError, PeerError
from protocol.work.rollout import Submission

_EXPECTED = (UserError, LocalError)
"""What every rank raises alike."""
MEMORY_SHARE = 4
"""One part in so many of the memory may hold activations; beyond, they are computed again."""


class Trainer:
    """The child's state between operations; ``configure``, ``load`` and ``train`` are the operations.

    Where ``group`` is None the process is alone.
    """

    def __init__(self, group: Group | None = None) -> None:
        self._group = group
        self._config: Config | None = None
        self._recipe: Recipe | None = None
        self._dtype = torch.float32
        self._recompute = "auto"
        self._policy: Policy | None = None
        self._learner: Learner | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._reference: tuple[str, str] | None = None

    def configure(
        self,
        config: str,
        recipe: dict[str, Any],
        tokenizer: str = "",
        threads: int = 1,
        dtype: str = "float32",
        device: str = AUTO,
        recompute: str = "auto",
    ) -> dict[str, Any]:
        """Read the model's configuration (a path).

        The trainer needs no tokenizer, whose path is accepted all the same, so that all torch children are configured
        alike. ``dtype`` is the one in which the domain computes; ``recompute`` says whether activations are computed
        again for the backward pass: "on", "off" or, by the memory there is, "auto".
        """
        torch.set_num_threads(threads)
        self._config, self._recipe = read_config(Path(config)), Recipe(**recipe)
        self._dtype = sharding.DTYPES[dtype]
        if self._group is None:
            self._group = sharding.alone(chosen(device), sharded=self._dtype is not torch.float32)
        self._recompute = recompute
        self._learner = self._policy = None
        self._policy = make_policy(self._config, self._recipe, self._group, self._dtype)
        needed = activation_bytes(self._config, self._group.device, self._dtype)
        again = recompute == "on" or (recompute == "auto" and needed * MEMORY_SHARE > _memory(self._group.device))
        self._policy.model.recompute = again
        return {
            "parameters": parameter_count(self._policy.model),
            "processes": self._group.size,
            "recompute": again,
        }

    def load(
        self, manifest: str, weights: str, checkpoint: str | None = None, reference: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Load a version, and the checkpoint that goes with it where there is one; else the optimizer starts afresh.

        ``reference`` are the manifest's and the whole file's path of version 0, for a recipe with a KL term.
        """
        if self._policy is None or self._recipe is None or self._group is None:
            raise LocalError("configure comes before load")
        group, policy, recipe = self._group, self._policy, self._recipe
        self._learner = None
        policy.zero_grad(set_to_none=True)  # a step that failed left some
        described = group.together(partial(weight_files.read_manifest, Path(manifest)))
        group.together(lambda: _fill(group, policy, weight_files.map_whole(described, Path(weights))))
        checksum = group.checksum(policy.model.parameters())
        # In the manifest's order: the next version is written in the same one.
        self._dtypes = {info.name: weight_files.DTYPES[info.dtype] for info in described.tensors}
        self._reference = None if reference is None else (reference[0], reference[1])
        learner = Learner(policy, recipe, group)
        if checkpoint is not None:
            group.together(lambda: checkpoints.restore(learner, Path(checkpoint), checksum))
        self._learner = learner
        return {"checksum": checksum, "updates": learner.updates}

    def train(self, submissions: list[str], output: str, checkpoint: str) -> dict[str, Any]:
        """One step over the submissions in these files. Writes the next version's whole file and its checkpoint.

        Where the step had to be stopped (rule 2), the answer is ``stopped``, the reason, and nothing else.
        """
        learner, recipe, group = self._learner, self._recipe, self._group
        if learner is None or recipe is None or group is None:
            raise LocalError("the trainer has no version loaded: after an error the last good one must be loaded again")
        samples = group.together(lambda: read_samples(submissions, recipe))
        if recipe.kl and self._reference is None:
            raise LocalError("the recipe has a KL term, and no reference was loaded")
        self._learner = None  # until the step has succeeded
        try:
            metrics = learner.train(samples, self._reference_policy)
        except FloatingPointError as error:
            return {"stopped": str(error)}
        layout, checksum = checkpoints.write(learner, self._dtypes, Path(output), Path(checkpoint))
        self._learner = learner
        return {"metrics": metrics, "tensors": layout, "checksum": checksum}

    def _reference_policy(self) -> Policy:
        """The policy of version 0, in the dtype in which the domain computes."""
        assert self._config is not None
        assert self._recipe is not None
        assert self._group is not None
        assert self._reference is not None
        manifest, weights = map(Path, self._reference)
        group = self._group
        made = make_policy(self._config, self._recipe, group, self._dtype, frozen=True)
        described = group.together(lambda: weight_files.read_manifest(manifest))
        group.together(lambda: _fill(group, made, weight_files.map_whole(described, weights)))
        return made


def _fill(group: Group, policy: Policy, tensors: Mapping[str, Tensor]) -> None:
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


def read_samples(paths: Sequence[str], recipe: Recipe) -> list[Sample]:
    """The samples of the submissions in these files, in their order. Raises ``UserError``."""
    return [sample for path in paths for sample in samples_of(read_submission(Path(path), recipe), recipe)]


def operations(group: Group | None = None) -> dict[str, child_loop.Operation]:
    """The trainer's operations over one fresh state."""
    trainer = Trainer(group)
    return {
        "configure": trainer.configure,
        "load": trainer.load,
        "train": trainer.train,
        "convert": weight_files.convert,
    }


def _told(group: Group, name: str, operation: child_loop.Operation, **arguments: Any) -> dict[str, Any]:
    """Rank 0's form of an operation: the others do the same. After a surprise the ranks are out of step."""
    try:
        group.tell((name, arguments))
        return operation(**arguments)
    except _EXPECTED:
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Serve until the socket closes; see rule 3."""
    if len(arguments) == 1:
        child_loop.run(operations, list(arguments))
        return
    connection = child_loop.connect(int(arguments[0]))
    group = sharding.join(Path(arguments[1]), chosen(AUTO))
    table = operations(group)
    if group.first:
        with suppress(OSError):
            child_loop.serve({name: partial(_told, group, name, each) for name, each in table.items()}, connection)
        return
    while True:
        name, words = group.tell(None)
        with suppress(*_EXPECTED):
            table[name](**words)


if __name__ == "__main__":
    main(sys.argv[1:])
