"""A model with its optimizer: what one step of training does with samples (the loss itself: ``node.workers.grpo``).

1. A step drops groups without signal and takes ``inner_steps`` optimizer steps, each over its own share of the groups.
   π_old is that of the weights before the first of them.
2. An optimizer step is cut into passes of rows of like width. Where several processes share it, each gets its part of
   the passes, and idle ones so that all have as many: a pass gathers weights from all ranks, so unequal numbers would
   hang. The denominator is that of all ranks together.
3. A loss or gradient that is not finite is an error on every rank, before the optimizer has moved anything by it.
4. The reference model is in memory only while its log-probabilities are computed, when there are no gradients yet: it
   takes no more room than they do later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from node.workers import grpo, row_layout
from node.workers.architectures import build
from node.workers.model_config import ModelConfig
from node.workers.policy import TrainedPolicy
from node.workers.sharding import Ranks
from protocol.constants import MILLION
from protocol.domain import Recipe
from protocol.work import schedule
from protocol.work.rollout import Submission

BETAS = (0.9, 0.99)
ROW_SLOTS = {"cpu": 256, "cuda": 2048}
BATCH_SLOTS = {"cpu": 2048, "cuda": 32768}
"""Slots of a row and of one pass: bounds memory, and keeps activations in a small machine's cache. No influence on the
mathematics."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A group to learn from: task rewards in micro, ``reported`` −log μ of every response token in micro, and the
    ``target`` length where there is length control."""

    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]
    reported: Sequence[Sequence[int]]
    rewards: Sequence[int]
    target: int | None = None


@dataclass(slots=True)
class _Pass:
    """One forward and backward pass: rows, and what belongs to each of their N response tokens."""

    rows: row_layout.Rows
    tokens: grpo.Tokens


@dataclass(slots=True)
class _Step:
    """One optimizer step: this rank's passes, and the denominator and tokens of all ranks."""

    passes: list[_Pass]
    denominator: float
    tokens: int


def samples_of(submission: Submission, recipe: Recipe) -> list[TrainingSample]:
    """A submission's groups as samples; target lengths follow from the seeds of their prompts."""
    made = []
    for group in submission.groups:
        seed = schedule.seed(submission.domain, submission.weights, submission.author, group.counter)
        made.append(
            TrainingSample(
                prompt=group.prompt,
                responses=[response.tokens for response in group.responses],
                reported=[response.logprobs for response in group.responses],
                rewards=[response.reward for response in group.responses],
                target=schedule.target_length(seed, recipe.target_lengths),
            )
        )
    return made


def make_policy(
    config: ModelConfig, recipe: Recipe, group: Ranks, dtype: torch.dtype, *, frozen: bool = False
) -> TrainedPolicy:
    """A policy without weights yet, placed on the group's devices (``Group.place``)."""
    with torch.device("meta"):
        model = build(config)
        policy = TrainedPolicy(model, recipe.temperature / MILLION)
    group.place(policy, model.layers, dtype, frozen=frozen)
    return policy


def activation_bytes(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> int:
    """About how much the layers of one pass keep for their backward pass, without recomputation."""
    inner = (2 * config.heads + 2 * config.key_value_heads) * config.head_size
    values = 10 * config.hidden + 4 * config.intermediate + 3 * inner
    return BATCH_SLOTS[device.type] * config.layers * values * dtype.itemsize


class Learner:
    """A policy with its optimizer, on one rank. ``updates`` counts optimizer steps since version 0, for the warm-up."""

    def __init__(self, policy: TrainedPolicy, recipe: Recipe, group: Ranks) -> None:
        self.policy = policy
        self.recipe = recipe
        self.group = group
        self.limits = grpo.ObjectiveLimits.of(recipe)
        self.updates = 0
        self.optimizer = torch.optim.AdamW(
            self.parameters().values(), lr=0.0, betas=BETAS, weight_decay=recipe.weight_decay / MILLION, fused=True
        )
        self._sums = torch.zeros(len(grpo.MEASURES), dtype=torch.float64)

    def parameters(self) -> dict[str, Tensor]:
        """The model's parameters by name, in a fixed order."""
        return dict(self.policy.model.named_parameters())

    # One step

    def train(
        self, samples: Sequence[TrainingSample], reference: Callable[[], TrainedPolicy] | None = None
    ) -> dict[str, int | float]:
        """Take one step's optimizer steps and return its metrics; every rank is given the same samples.

        ``reference`` makes the policy of version 0, which a recipe with a KL term asks for. Raises
        ``FloatingPointError`` where a loss or gradient is not finite; the model may have moved by then and must be
        loaded again.
        """
        begun = time.perf_counter()
        self._sums = torch.zeros(len(grpo.MEASURES), dtype=torch.float64, device=self.group.device)
        used = [(sample, found) for sample in samples if (found := self._advantages(sample)) is not None]
        # Dealt out like cards, so that every optimizer step sees every author and age.
        shares = [used[first :: self.recipe.inner_steps] for first in range(self.recipe.inner_steps)]
        steps = [self._plan(share) for share in shares if share]
        planned = [each for step in steps for each in step.passes]
        if self.limits.kl > 0 and planned:
            if reference is None:
                raise ValueError("a recipe with a KL term needs the reference policy")
            self._evaluate_before(reference(), planned, "reference")
        if len(steps) > 1:  # with a single one, the policy before the step is the one in its own forward pass
            self._evaluate_before(self.policy, planned, "old")
        loss, norm = 0.0, 0.0
        for step in steps:
            found_loss, found_norm = self._update(step)
            loss, norm = loss + found_loss / len(steps), max(norm, found_norm)
        tokens = sum(step.tokens for step in steps)
        means = [value / max(1, tokens) for value in self.group.sum(self._sums.tolist())]
        return {
            "loss": loss,
            "grad_norm": norm,
            **dict(zip(grpo.MEASURES, means, strict=True)),
            "groups_used": len(used),
            "groups_dropped": len(samples) - len(used),
            "trained": sum(len(sample.responses) for sample, _ in used),
            "tokens": tokens,
            "updates": self.updates,
            "learning_rate": self._rate(),
            "seconds": time.perf_counter() - begun,
        }

    def _advantages(self, sample: TrainingSample) -> list[float] | None:
        lengths = [len(response) for response in sample.responses]
        return grpo.advantages(
            sample.rewards, lengths=lengths, target=sample.target, penalty=self.recipe.length_penalty
        )

    def _plan(self, share: Sequence[tuple[TrainingSample, list[float]]]) -> _Step:
        device, kind = self.group.device, self.group.device.type
        lengths = [len(response) for sample, _ in share for response in sample.responses]
        weights = [grpo.token_weight(length, self.recipe.normalisation) for length in lengths]
        by_response = torch.tensor([value for _, found in share for value in found], device=device)
        weight = torch.tensor(weights, device=device)
        reported = torch.tensor(
            [-value / MILLION for sample, _ in share for line in sample.reported for value in line], device=device
        )
        groups = [row_layout.RowGroup(sample.prompt, sample.responses) for sample, _ in share]
        slots = sum(len(sample.prompt) + sum(map(len, sample.responses)) for sample, _ in share)
        packed = row_layout.pack(
            groups,
            row_slots=ROW_SLOTS[kind],
            batch_slots=min(BATCH_SLOTS[kind], -(-slots // self.group.size)),
            sort=True,
            device=device,
        )
        mine, idle = self._mine(packed)
        passes = []
        for batch in mine + [row_layout.idle(device)] * idle:
            places, owners = batch.places, batch.owners
            passes.append(_Pass(batch, grpo.Tokens(reported[places], None, None, by_response[owners], weight[owners])))
        for each in passes[len(mine) :]:
            each.tokens = replace(each.tokens, weight=torch.zeros_like(each.tokens.weight))
        denominator = sum(length * each for length, each in zip(lengths, weights, strict=True))
        return _Step(passes, denominator, sum(lengths))

    def _mine(self, packed: Sequence[row_layout.Rows]) -> tuple[list[row_layout.Rows], int]:
        """This rank's part, and how many idle passes it needs: the largest go first, each to whom has least so far."""
        parts: list[list[row_layout.Rows]] = [[] for _ in range(self.group.size)]
        loads = [0] * self.group.size
        for batch in sorted(packed, key=lambda batch: -batch.slots):
            rank = loads.index(min(loads))
            parts[rank].append(batch)
            loads[rank] += batch.slots
        mine = parts[self.group.rank]
        return mine, max(map(len, parts)) - len(mine)

    @torch.no_grad()
    def _evaluate_before(self, policy: TrainedPolicy, passes: Sequence[_Pass], field: str) -> None:
        """Compute the log-probabilities that ``policy`` gives the tokens, before anything is updated."""
        for each in passes:
            each.tokens = replace(each.tokens, **{field: policy(each.rows)})

    def _rate(self) -> float:
        warmup = max(1, self.recipe.warmup_steps)
        return self.recipe.learning_rate / 10**12 * min(1.0, (self.updates + 1) / warmup)

    def _update(self, step: _Step) -> tuple[float, float]:
        """One optimizer step; returns its loss and gradient norm."""
        total = torch.zeros((), device=self.group.device)
        for each in step.passes:
            loss = self.policy(each.rows, self._evaluation(each.tokens, step.denominator))
            loss.backward()
            total += loss.detach()
        limit = self.recipe.grad_clip / MILLION or math.inf
        norm = float(self.group.whole(torch.nn.utils.clip_grad_norm_(self.parameters().values(), limit)))
        (found,) = self.group.sum([total.item()])
        if not (math.isfinite(found) and math.isfinite(norm)):
            raise FloatingPointError(f"the loss ({found}) or the gradient norm ({norm}) is not finite")
        for settings in self.optimizer.param_groups:
            settings["lr"] = self._rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return found, norm

    def _evaluation(self, tokens: grpo.Tokens, denominator: float) -> Callable[[Tensor, Tensor, slice], Tensor]:
        def evaluate(logprobs: Tensor, spread: Tensor, part: slice) -> Tensor:
            loss, sums = grpo.loss(logprobs, spread, tokens.part(part), self.limits, denominator)
            if tokens.weight.any():  # an idle pass measures nothing
                self._sums += sums
            return loss

        return evaluate

    # What goes on from step to step

    def state(self) -> dict[str, Tensor]:
        """Everything beside ``updates`` that the next step needs and the published weights do not say: masters and
        Adam's moments, sharded as they are."""
        found = {}
        for name, parameter in self.parameters().items():
            found[f"master.{name}"] = parameter
            for key in MOMENTS if self.updates else ():
                found[f"{key}.{name}"] = self.optimizer.state[parameter][key]
        return found

    @torch.no_grad()
    def restore(self, updates: int, read: Callable[[str], Tensor]) -> None:
        """The inverse of ``state``: ``read`` gives this rank's slice of a tensor."""
        self.updates = updates
        for name, parameter in self.parameters().items():
            mine = self.group.local(parameter)
            mine.copy_(read(f"master.{name}"))
            if updates:
                state: dict[str, Tensor] = {"step": torch.tensor(float(updates), device=mine.device)}
                for key in MOMENTS:
                    state[key] = self.group.like(read(f"{key}.{name}").to(mine.device), parameter)
                self.optimizer.state[parameter] = state

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Each of ``tensors`` whole, one at a time. Every rank must go through all of them."""
        return (self.group.whole(tensor) for tensor in tensors.values())
