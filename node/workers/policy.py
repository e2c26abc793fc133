"""The policy as the trainer sees it: from rows to the log-probabilities of their response tokens, and to a loss.

1. Logits are never all in memory: the output projection, the loss behind it and their gradients are computed for
   ``HEAD_VALUES`` logits at a time. What is left of a piece is its gradient at the hidden states, from which one
   backward pass goes on.
2. A model of small vocabulary is done in one piece, by the same code.
3. Everything that uses weights is inside ``forward``: where they are sharded, that is when they are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from node.workers.model import LanguageModel, capped
from node.workers.row_layout import Rows, chosen_by

HEAD_VALUES = 1 << 23
"""Logits worked on at a time: 32 MiB, thrice. No influence on results but rounding."""

Evaluate = Callable[[Tensor, Tensor, slice], Tensor]
"""(log-probabilities [n], entropies [n], which of the N tokens they are) → their share of the loss."""


class TrainedPolicy(nn.Module):
    """A model at a sampling temperature."""

    def __init__(self, model: LanguageModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, rows: Rows, evaluate: Evaluate | None = None) -> Tensor:
        """Without ``evaluate`` the log-probabilities [N] of the response tokens, without gradient; with it the loss
        [], the sum of what it returns for pieces of the tokens. It is called once a piece, in the forward pass."""
        hidden = chosen_by(self.model, rows)
        head, bias, soft_cap = self.model.head, self.model.head_bias, self.model.soft_cap
        if evaluate is None:
            found = [
                _log_softmax(_logits(hidden[part], head, bias, soft_cap), self.temperature).gather(
                    1, rows.targets[part, None]
                )[:, 0]
                for part in _pieces(len(rows.targets), self.model.config.vocabulary)
            ]
            return torch.cat(found).detach()
        loss: Tensor = _Head.apply(hidden, head, bias, soft_cap, rows.targets, self.temperature, evaluate)  # type: ignore[no-untyped-call]
        return loss


def _pieces(count: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, HEAD_VALUES // vocabulary)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


@torch.no_grad()
def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None, soft_cap: float | None) -> Tensor:
    """The logits [n, V] in float32 (``LanguageModel``), without gradient."""
    return capped(functional.linear(hidden, head, bias).float(), soft_cap)


@torch.no_grad()
def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) [n, V], without gradient. ``logits`` are spent."""
    return torch.log_softmax(logits.div_(temperature) if temperature != 1.0 else logits, dim=-1)


class _Head(torch.autograd.Function):
    """The loss of rule 1. Its gradients are known when the forward pass is done.

    With p = softmax(z / T) and H its entropy: ∂ log p_t / ∂ z_j = ([j = t] − p_j) / T, ∂ H / ∂ z_j = −p_j (log p_j +
    H) / T. Below a soft cap c, z = c · tanh(x / c): ∂ z_j / ∂ x_j = 1 − (z_j / c)².
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        soft_cap: float | None,
        targets: Tensor,
        temperature: float,
        evaluate: Evaluate,
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        at_hidden = torch.empty_like(hidden)
        at_head = torch.zeros_like(head, dtype=torch.float32)
        at_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part in _pieces(len(targets), head.shape[0]):
            logits = _logits(hidden[part], head, bias, soft_cap)
            slopes = None if soft_cap is None else 1 - (logits / soft_cap) ** 2
            logs = _log_softmax(logits, temperature)
            shares = logs.exp()
            # a product of matrices sums without a buffer of the logits' size
            spread = -torch.bmm(shares[:, None], logs[:, :, None])[:, 0, 0]
            chosen = logs.gather(1, targets[part, None])[:, 0]
            with torch.enable_grad():
                leaves = chosen.requires_grad_(), spread.requires_grad_()
                loss = evaluate(*leaves, part)
                at_chosen, at_spread = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            total += loss.detach()
            if bool(at_spread.any()):
                gradient = logs.add_(spread.detach()[:, None]).mul_(at_spread[:, None]).add_(at_chosen[:, None])
                gradient = gradient.mul_(shares).neg_()
            else:
                gradient = shares.mul_(-at_chosen[:, None])
            gradient.scatter_add_(1, targets[part, None], at_chosen[:, None])
            gradient = gradient.div_(temperature)
            if slopes is not None:
                gradient = gradient.mul_(slopes)
            gradient = gradient.to(hidden.dtype)
            at_hidden[part] = gradient @ head
            at_head += gradient.T @ hidden[part]
            if at_bias is not None:
                at_bias += gradient.float().sum(0)
        ctx.save_for_backward(at_hidden, at_head.to(head.dtype), None if at_bias is None else at_bias.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        at_hidden, at_head, at_bias = ctx.saved_tensors
        scaled_bias = None if at_bias is None else at_bias * gradients[0]
        return at_hidden * gradients[0], at_head * gradients[0], scaled_bias, None, None, None, None
