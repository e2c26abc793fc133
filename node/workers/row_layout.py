"""Rows: how groups of sequences that share a prompt are laid out for one forward pass.

1. A row holds a prompt once and behind it any number of its responses, so a group of sixteen pays for its prompt once,
   in replay as in training.
2. A response's slots see the prompt and the earlier slots of their own response, nothing else; its positions go on from
   the prompt's end. So neither a neighbour in the row nor padding can alter a result.
3. The slot *before* a token is the one whose state chose it: the prompt's last slot for a first token. A response's
   last token is therefore never fed in.
4. Where no row holds two responses, rule 2 is causality alone, for padding comes last: such rows need no mask. Long
   responses have rows to themselves, so memory does not grow with the square of their length.

Shape letters: B rows, S slots, N response tokens of all rows together, in the order of group, response, token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.workers.model import LanguageModel

PADDING = -1


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A prompt and its responses, as token ids. A prompt and each response have at least one token."""

    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of rows. ``tokens``, ``positions``, ``segments``: int64 [B, S], segment 0 the prompt, i the row's i-th
    response, ``PADDING`` none. ``sources``: int64 [N], flat index (row · S + slot) of the state that chose each
    response token; ``targets``: int64 [N], those tokens; ``owners``: int64 [N], number of the sequence among all
    responses of the packed groups; ``places``: int64 [N], number of the token among all their tokens."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    sources: Tensor
    targets: Tensor
    owners: Tensor
    places: Tensor

    @property
    def slots(self) -> int:
        """The padded size B · S: what a pass costs."""
        return self.tokens.numel()

    def mask(self) -> Tensor | None:
        """bool [B, 1, S, S]: which slot (second last axis) may attend to which. None: each to itself and to all before
        it (rule 4)."""
        if int(self.segments.max()) <= 1:
            return None
        slots = self.segments.shape[1]
        query, key = self.segments[:, :, None], self.segments[:, None, :]
        causal = torch.ones((slots, slots), dtype=torch.bool, device=self.segments.device).tril()
        mask = causal & ((key == 0) | (key == query)) & (key != PADDING)
        # A padding slot attends to itself: a softmax over nothing would be NaN and spoil gradients.
        mask |= torch.eye(slots, dtype=torch.bool, device=self.segments.device)
        return mask[:, None]


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    positions: list[int]
    segments: list[int]
    sources: list[int]
    targets: list[int]
    owners: list[int]
    places: list[int]


def _open(prompt: Sequence[int]) -> _Row:
    return _Row(list(prompt), list(range(len(prompt))), [0] * len(prompt), [], [], [], [])


def _append(row: _Row, prompt_size: int, response: Sequence[int], owner: int, place: int) -> None:
    start, fed = len(row.tokens), list(response[:-1])
    segment = row.segments[-1] + 1  # they ascend along a row
    row.tokens += fed
    row.positions += range(prompt_size, prompt_size + len(fed))
    row.segments += [segment] * len(fed)
    row.sources += [prompt_size - 1, *range(start, start + len(fed))]
    row.targets += response
    row.owners += [owner] * len(response)
    row.places += range(place, place + len(response))


def _stack(rows: Sequence[_Row], device: torch.device) -> Rows:
    slots = max(len(row.tokens) for row in rows)

    def padded(values: Sequence[Sequence[int]], filler: int) -> Tensor:
        return torch.tensor([[*line, *[filler] * (slots - len(line))] for line in values], device=device)

    return Rows(
        tokens=padded([row.tokens for row in rows], 0),
        positions=padded([row.positions for row in rows], 0),
        segments=padded([row.segments for row in rows], PADDING),
        sources=torch.tensor([n * slots + slot for n, row in enumerate(rows) for slot in row.sources], device=device),
        targets=torch.tensor([token for row in rows for token in row.targets], device=device),
        owners=torch.tensor([owner for row in rows for owner in row.owners], device=device),
        places=torch.tensor([place for row in rows for place in row.places], device=device),
    )


def pack(
    groups: Sequence[RowGroup],
    *,
    row_slots: int = 1024,
    batch_slots: int = 8192,
    sort: bool = False,
    device: torch.device | None = None,
) -> list[Rows]:
    """Lay out ``groups`` in batches whose concatenated ``targets`` keep the order of group, response and token.

    A row takes responses until it has ``row_slots`` slots (the mask grows with their square), then the prompt is
    repeated in a new row; a batch takes rows until its padded size reaches ``batch_slots``. One response always fits.
    With ``sort`` rows of like width share a batch, which leaves little padding and gives up the order: ``places`` has
    it.
    """
    rows: list[_Row] = []
    owner = place = 0
    for group in groups:
        row = _open(group.prompt)
        for response in group.responses:
            if row.owners and len(row.tokens) + len(response) - 1 > row_slots:
                rows.append(row)
                row = _open(group.prompt)
            _append(row, len(group.prompt), response, owner, place)
            owner += 1
            place += len(response)
        rows.append(row)
    if sort:
        rows.sort(key=lambda row: -len(row.tokens))  # the largest first: where memory is short, it shows at once
    where = device or torch.device("cpu")
    batches: list[Rows] = []
    batch: list[_Row] = []
    widest = 0
    for row in rows:
        width = max(widest, len(row.tokens))
        if batch and width * (len(batch) + 1) > batch_slots:
            batches.append(_stack(batch, where))
            batch, width = [], len(row.tokens)
        batch.append(row)
        widest = width
    if batch:
        batches.append(_stack(batch, where))
    return batches


def idle(device: torch.device) -> Rows:
    """The smallest pass there is, for whom has nothing to do while others work: one token, to be given no weight."""
    (made,) = pack([RowGroup([0], [[0]])], device=device)
    return made


def chosen_by(model: LanguageModel, rows: Rows) -> Tensor:
    """The final-norm states [N, H] that chose the rows' response tokens (one forward pass)."""
    hidden: Tensor = model(rows.tokens, rows.positions, rows.mask())
    return hidden.flatten(0, 1)[rows.sources]
