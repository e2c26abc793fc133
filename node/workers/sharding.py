"""How the trainer's parameters lie: whole in one process, or a slice of each in several (FSDP2).

1. One process that computes in float32 has plain tensors and no process group: nothing is started that it does not
   need. Several processes are started through torchrun; rank 0 speaks to the daemon and passes on what it says.
2. Every rank runs every operation. What may fail on one of them alone (reading files) runs in ``together``, after which
   all raise or none does. Any other exception of a rank ends its process; torchrun then ends the others, and the daemon
   starts anew.
3. Masters and reductions are float32. Where the domain computes in bfloat16, parameters are rounded to it for each
   forward pass: the model that is trained is the one that is published.
4. Gradients are summed over ranks, not averaged: the loss already has one denominator for all of them.
5. Processes meet in a file of a folder of their own and talk over the loopback interface.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from node.errors import UserError
from proofs.checksum import checksum_of_sums, value_sum

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# A rank waits for the next operation as long as the daemon has none. One that hangs is the daemon's deadline to notice.
_PATIENCE: Final = datetime.timedelta(days=365)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together; ``mesh`` is None where parameters are plain tensors."""

    rank: int
    size: int
    device: torch.device
    mesh: Any = None

    @property
    def first(self) -> bool:
        """Whether this process speaks to the daemon and writes files."""
        return self.rank == 0

    # Messages between ranks

    def broadcast(self, message: Any) -> Any:
        """What rank 0 passes in, on every rank."""
        if self.size == 1:
            return message
        box = [message]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def _all(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each of ``values``, in the order of ranks."""
        return [sum(column) for column in zip(*self._all(list(values)), strict=True)]

    def together(self, work: Callable[[], T]) -> T:
        """The result of ``work``; where it raises ``UserError`` on any rank, that is raised on all."""
        problem, result = None, None
        try:
            result = work()
        except UserError as error:
            problem = str(error)
        for found in self._all(problem):
            if found is not None:
                raise UserError(found)
        return result  # type: ignore[return-value]

    # Parameters

    def place(
        self, module: nn.Module, layers: Iterable[nn.Module], dtype: torch.dtype, *, frozen: bool = False
    ) -> None:
        """Give ``module``, made on the meta device, room on the device: sharded layer by layer where there is a mesh.

        Parameters are float32 and computed with in ``dtype``; those of a ``frozen`` module are kept in it as well.
        """
        kept = dtype if frozen else torch.float32
        module.to(kept).requires_grad_(not frozen)
        if self.mesh is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(
                param_dtype=None if dtype is kept else dtype, reduce_dtype=None if dtype is kept else torch.float32
            )
            whole = [*layers, module]
            for part in whole:
                fully_shard(part, mesh=self.mesh, mp_policy=policy)
            for part in whole:
                part.set_gradient_divide_factor(1.0)  # type: ignore[operator]
                part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        module.to_empty(device=self.device)

    def bounds(self, rows: int) -> tuple[int, int]:
        """Which of the ``rows`` of a parameter's first dimension lie here: FSDP2 splits it as torch.chunk does."""
        if self.mesh is None:
            return 0, rows
        step = -(-rows // self.size)
        return min(rows, self.rank * step), min(rows, (self.rank + 1) * step)

    @torch.no_grad()
    def fill(self, parameter: Tensor, value: Tensor) -> None:
        """Copy this rank's slice of the whole ``value``."""
        start, stop = self.bounds(len(value))
        self.local(parameter).copy_(value[start:stop])

    def local(self, parameter: Tensor) -> Tensor:
        """This rank's slice of a parameter, in the parameter's own memory."""
        to_local = getattr(parameter, "to_local", None)
        found: Tensor = parameter.detach() if to_local is None else to_local().detach()
        return found

    def whole(self, value: Tensor) -> Tensor:
        """The whole of a parameter or of what is sharded like it. Every rank must ask, in the same order."""
        full = getattr(value, "full_tensor", None)
        return value.detach() if full is None else full().detach()

    def like(self, value: Tensor, parameter: Tensor) -> Tensor:
        """``value``, a tensor of this rank's slice, sharded as ``parameter`` is."""
        if self.mesh is None:
            return value
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )

    def checksum(self, parameters: Iterable[Tensor]) -> int:
        """The layout-independent checksum of what lies on all ranks together."""
        return checksum_of_sums(self._all(value_sum(map(self.local, parameters))))


def alone(device: str, *, sharded: bool) -> Ranks:
    """The group of a single process; ``sharded`` for one that computes in another precision than it keeps."""
    place = torch.device(device)
    if not sharded:
        return Ranks(0, 1, place)
    if not dist.is_initialized():
        dist.init_process_group(_backend(place), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return Ranks(0, 1, place, _mesh(place, 1))


def join(folder: Path, device: str) -> Ranks:
    """The group that torchrun started this process in; its processes meet in ``folder``."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = torch.device(device if device == "cpu" else f"{device}:{os.environ['LOCAL_RANK']}")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    store = dist.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]
    dist.init_process_group(_backend(place), store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    return Ranks(rank, size, place, _mesh(place, size))


def _backend(device: torch.device) -> str:
    # Messages between ranks travel from memory to memory, whatever computes.
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def _mesh(device: torch.device, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (size,))
