"""The trainer child: one step of asynchronous GRPO makes the next version of the weights.

1. A step takes verified submissions, drops groups without signal, and takes ``inner_steps`` optimizer steps, each
   over its own share of the groups. π_old is that of the weights before the first of them (``node.workers.grpo``).
2. Master weights and the optimizer are float32; what is published has the dtypes of the manifest that was loaded.
3. The checkpoint (a safetensors file) holds everything that goes on from step to step. Loading the version and its
   checkpoint continues bit for bit as if the child had never ended.
4. A loss or gradient that is not finite is an error: nothing is written, and the child refuses to train until the
   last good version is loaded again.
5. Both files are written beside their destination and renamed, the checkpoint first: a version never lacks the state
   that made it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as encode_safetensors
from torch import Tensor

from node.workers import child, grpo, rows
from node.workers import weights as weight_files
from node.workers.child import UserError
from node.workers.model import CausalLM, parameter_count, read_config
from proofs.checksum import value_checksum
from protocol.constants import MILLION
from protocol.domain import Recipe
from protocol.errors import LocalError, PeerError
from protocol.rollout import Submission

BETAS = (0.9, 0.99)
ROW_SLOTS = 256
BATCH_SLOTS = 2048
"""Slots of one pass: bounds memory, and keeps activations in a small machine's cache. No influence on the
mathematics."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A group to learn from: rewards in micro, ``reported`` −log μ of every response token in micro."""

    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]
    reported: Sequence[Sequence[int]]
    rewards: Sequence[int]


@dataclass(slots=True)
class _Batch:
    """One pass: rows, and what belongs to each of their N response tokens."""

    rows: rows.Rows
    reported: Tensor
    advantage: Tensor
    old: Tensor | None = None


@dataclass(slots=True)
class _Sums:
    """Sums over tokens (but ``grad_norm``: the largest of the step)."""

    loss: float = 0.0
    ratio: float = 0.0
    weight: float = 0.0
    clipped: int = 0
    entropy: float = 0.0
    kl: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0


def samples_of(submission: Submission) -> list[Sample]:
    """A submission's groups as samples."""
    return [
        Sample(
            prompt=group.prompt,
            responses=[response.tokens for response in group.responses],
            reported=[response.logprobs for response in group.responses],
            rewards=[response.reward for response in group.responses],
        )
        for group in submission.groups
    ]


class Learner:
    """A model with its optimizer. ``updates`` counts optimizer steps since version 0, for the warm-up."""

    def __init__(self, model: CausalLM, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.limits = grpo.Limits.of(recipe)
        self.temperature = recipe.temperature / MILLION
        self.updates = 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=BETAS, weight_decay=recipe.weight_decay / MILLION
        )

    def train(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Take one step's optimizer steps and return its metrics. Raises ``FloatingPointError`` where a loss or
        gradient is not finite; the model may have moved by then and must be loaded again."""
        begun = time.perf_counter()
        used = [(sample, advantage) for sample in samples if (advantage := grpo.advantages(sample.rewards)) is not None]
        # Dealt out like cards, so that every optimizer step sees every author and age.
        shares = [used[first :: self.recipe.inner_steps] for first in range(self.recipe.inner_steps)]
        steps = [self._batches(share) for share in shares if share]
        if len(steps) > 1:  # with a single one, the policy before the step is the one in its own forward pass
            self._recompute_old(steps)
        sums = _Sums()
        for batches in steps:
            self._update(batches, sums)
        tokens = max(1, sums.tokens)
        return {
            "loss": sums.loss / max(1, len(steps)),
            "grad_norm": sums.grad_norm,
            "ratio_mean": sums.ratio / tokens,
            "importance_mean": sums.weight / tokens,
            "clip_share": sums.clipped / tokens,
            "entropy": sums.entropy / tokens,
            "behaviour_kl": sums.kl / tokens,
            "groups_used": len(used),
            "groups_dropped": len(samples) - len(used),
            "trained": sum(len(sample.responses) for sample, _ in used),
            "tokens": sums.tokens,
            "updates": self.updates,
            "learning_rate": self._rate(),
            "seconds": time.perf_counter() - begun,
        }

    def _batches(self, share: Sequence[tuple[Sample, list[float]]]) -> list[_Batch]:
        packed = rows.pack(
            [rows.Group(sample.prompt, sample.responses) for sample, _ in share],
            row_slots=ROW_SLOTS,
            batch_slots=BATCH_SLOTS,
            device=self.model.device,
        )
        reported = [-value / MILLION for sample, _ in share for line in sample.reported for value in line]
        by_response = torch.tensor([value for _, advantage in share for value in advantage], device=self.model.device)
        behind = torch.tensor(reported, device=self.model.device)
        batches: list[_Batch] = []
        for batch in packed:
            count = len(batch.targets)
            batches.append(_Batch(batch, behind[:count], by_response[batch.owners]))
            behind = behind[count:]
        return batches

    def _forward(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Logits [N, V] and the log-probabilities [N] of the response tokens."""
        logits = self.model.logits(rows.chosen_by(self.model, batch.rows))
        scaled = torch.log_softmax(logits / self.temperature, dim=-1)
        return logits, scaled.gather(1, batch.rows.targets[:, None])[:, 0]

    @torch.no_grad()
    def _recompute_old(self, steps: Sequence[Sequence[_Batch]]) -> None:
        for batches in steps:
            for batch in batches:
                batch.old = self._forward(batch)[1]

    def _rate(self) -> float:
        warmup = max(1, self.recipe.warmup_steps)
        return self.recipe.learning_rate / 10**12 * min(1.0, (self.updates + 1) / warmup)

    def _update(self, batches: Sequence[_Batch], sums: _Sums) -> None:
        """One optimizer step over ``batches``, all of its tokens weighing the same."""
        denominator = sum(len(batch.rows.targets) for batch in batches)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            logits, logprobs = self._forward(batch)
            old = logprobs.detach() if batch.old is None else batch.old
            found = grpo.objective(logprobs, old, batch.reported, batch.advantage, self.limits)
            # Without a coefficient, the two terms are measured and cost no backward pass.
            with torch.set_grad_enabled(self.limits.entropy > 0):
                spread = grpo.entropy(logits, self.temperature).sum()
            with torch.set_grad_enabled(self.limits.kl > 0):
                drift = grpo.behaviour_kl(logprobs, batch.reported).sum()
            loss = -(found.value.sum() + self.limits.entropy * spread - self.limits.kl * drift) / denominator
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            sums.ratio += found.ratio.sum().item()
            sums.weight += found.weight.sum().item()
            sums.clipped += int(found.clipped.sum())
            sums.entropy += spread.item()
            sums.kl += drift.item()
        limit = self.recipe.grad_clip / MILLION or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise FloatingPointError(f"the loss ({total}) or the gradient norm ({norm}) is not finite")
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.step()
        self.updates += 1
        sums.loss += total
        sums.grad_norm = max(sums.grad_norm, norm)
        sums.tokens += denominator

    def state(self) -> dict[str, Tensor]:
        """Everything that goes on from step to step beside the published weights: Adam's moments, and the masters."""
        tensors = {"updates": torch.tensor(self.updates)}
        for name, parameter in self.model.named_parameters():
            tensors[f"master.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of ``state``. Raises ``KeyError`` where something is missing."""
        self.updates = int(tensors["updates"])
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[f"master.{name}"])
            if self.updates:
                self.optimizer.state[parameter] = {
                    key: tensors[f"{key}.{name}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")
                }


class Trainer:
    """The child's state between operations; ``configure``, ``load`` and ``train`` are the operations."""

    def __init__(self) -> None:
        self._model: CausalLM | None = None
        self._recipe: Recipe | None = None
        self._learner: Learner | None = None
        self._dtypes: dict[str, torch.dtype] = {}

    def configure(
        self, config: str, recipe: dict[str, Any], tokenizer: str = "", threads: int = 1, device: str = "cpu"
    ) -> dict[str, Any]:
        """Read the model's configuration (a path). The trainer needs no tokenizer, whose path is accepted all the
        same, so that all torch children are configured alike."""
        torch.set_num_threads(threads)
        self._model = CausalLM(read_config(Path(config))).to(device)
        self._recipe = Recipe(**recipe)
        self._learner = None
        return {"parameters": parameter_count(self._model)}

    def load(self, manifest: str, weights: str, checkpoint: str | None = None) -> dict[str, Any]:
        """Load a version, and the checkpoint that goes with it where there is one; else the optimizer starts afresh."""
        if self._model is None or self._recipe is None:
            raise LocalError("configure comes before load")
        self._learner = None
        described = weight_files.read_manifest(Path(manifest))
        value = weight_files.load_into(self._model, weight_files.map_whole(described, Path(weights)))
        # In the manifest's order: the next version is written in the same one.
        self._dtypes = {info.name: weight_files.DTYPES[info.dtype] for info in described.tensors}
        learner = Learner(self._model, self._recipe)
        if checkpoint is not None:
            restore_checkpoint(learner, Path(checkpoint), value)
        self._learner = learner
        return {"checksum": value, "updates": learner.updates}

    def train(self, submissions: list[str], output: str, checkpoint: str) -> dict[str, Any]:
        """One step over the submissions in these files. Writes the next version's whole file and its checkpoint."""
        learner, recipe = self._learner, self._recipe
        if learner is None or recipe is None:
            raise LocalError("the trainer has no version loaded: after an error the last good one must be loaded again")
        samples = [sample for path in submissions for sample in samples_of(read_submission(Path(path), recipe))]
        self._learner = None  # until the step has succeeded
        metrics = learner.train(samples)
        published = self._published(learner.model)
        value = value_checksum(published.values())
        write_checkpoint(learner, Path(checkpoint), value)
        weight_files.write_whole(published.values(), Path(output))
        self._learner = learner
        return {"metrics": metrics, "tensors": weight_files.layout(published), "checksum": value}

    def _published(self, model: CausalLM) -> dict[str, Tensor]:
        parameters = dict(model.named_parameters())
        return {name: parameters[name].detach().to(dtype) for name, dtype in self._dtypes.items()}


def read_submission(path: Path, recipe: Recipe) -> Submission:
    """A verified submission's file. Raises ``UserError`` where it cannot be read (the store then lost or altered
    it)."""
    try:
        return Submission.parse(path.read_bytes(), recipe)
    except (OSError, PeerError) as error:
        raise UserError(f"cannot read the submission {path}: {error}") from None


def write_checkpoint(learner: Learner, path: Path, checksum: int) -> None:
    """Write the learner's state atomically, with the ``checksum`` of the version it belongs to."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in learner.state().items()}
    with weight_files.replacing(path) as file:
        file.write(encode_safetensors(tensors, metadata={"checksum": str(checksum)}))


def restore_checkpoint(learner: Learner, path: Path, checksum: int) -> None:
    """Restore the learner's state. Raises ``UserError`` where the file is damaged or belongs to another version."""
    try:
        with safe_open(path, framework="pt") as file:
            owner = (file.metadata() or {}).get("checksum")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if owner != str(checksum):
            raise UserError(f"the checkpoint {path} belongs to another version of the weights")
        learner.restore(tensors)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise UserError(f"cannot read the checkpoint {path}: {error}") from None


def operations() -> dict[str, child.Operation]:
    """The trainer's operations over one fresh state."""
    trainer = Trainer()
    return {
        "configure": trainer.configure,
        "load": trainer.load,
        "train": trainer.train,
        "convert": weight_files.convert,
    }


if __name__ == "__main__":
    child.run(operations)
