from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.workers import row_layout
from node.workers.row_layout import PADDING, RowGroup
from tests.node.workers import small

GROUPS = [
    RowGroup([5, 6, 7], [[8, 9, 1], [10], [11, 1]]),
    RowGroup([12], [[13, 14, 15, 16, 17]]),
    RowGroup([20, 21, 22, 23, 24, 25], [[26, 27], [28, 29, 30]]),
]


def test_layout_of_one_row() -> None:
    (batch,) = row_layout.pack(GROUPS[:1])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 11]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert batch.sources.tolist() == [2, 3, 4, 2, 2, 5]
    assert batch.targets.tolist() == [8, 9, 1, 10, 11, 1]
    assert batch.owners.tolist() == [0, 0, 0, 1, 2, 2]
    mask = batch.mask()
    assert mask is not None
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


def test_padding_is_seen_by_nobody_but_itself() -> None:
    (batch,) = row_layout.pack(GROUPS[:2])
    padding = (batch.segments == PADDING).nonzero().tolist()
    assert padding == [[1, 5]]
    mask = batch.mask()
    assert mask is not None
    assert mask[1, 0, :, 5].tolist() == [False] * 5 + [True]


def test_rows_of_one_response_need_no_mask() -> None:
    """And with more in one row of a batch, all have one."""
    assert [batch.mask() for batch in row_layout.pack(GROUPS, row_slots=1)] == [None]
    assert [batch.mask() is None for batch in row_layout.pack(GROUPS, row_slots=6, batch_slots=12)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(("row_slots", "batch_slots"), [(1, 1), (6, 14), (9, 20), (64, 64), (1024, 8192)])
def test_no_layout_changes_a_state(tmp_path: Path, row_slots: int, batch_slots: int) -> None:
    """Padding, neighbours in the row, the cut into rows and batches: each sequence alone is the same."""
    made = small.model(small.config(tmp_path))
    batches = row_layout.pack(GROUPS, row_slots=row_slots, batch_slots=batch_slots)
    with torch.no_grad():
        packed = torch.cat([row_layout.chosen_by(made, batch) for batch in batches])
        alone = []
        for group in GROUPS:
            for response in group.responses:
                tokens = torch.tensor([[*group.prompt, *response]])
                slots = tokens.shape[1]
                mask = torch.ones((slots, slots), dtype=torch.bool).tril()[None, None]
                hidden = made(tokens, torch.arange(slots)[None], mask)[0]
                alone.append(hidden[len(group.prompt) - 1 : -1])
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)
    targets = torch.cat([batch.targets for batch in batches]).tolist()
    assert targets == [token for group in GROUPS for response in group.responses for token in response]
    owners = torch.cat([batch.owners for batch in batches]).tolist()
    assert owners == [0, 0, 0, 1, 2, 2, *[3] * 5, 4, 4, 5, 5, 5]


def test_a_changed_neighbour_changes_nothing_else(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    other = [RowGroup(GROUPS[0].prompt, [[8, 9, 1], [10], [33, 34]]), *GROUPS[1:]]
    with torch.no_grad():
        before, after = (
            row_layout.chosen_by(made, batch) for groups in (GROUPS, other) for batch in row_layout.pack(groups)
        )
    changed = (before - after).abs().amax(dim=1) > 0
    assert changed.nonzero()[:, 0].tolist() == [5]  # only the last state of the third response saw the other token


def test_gradients_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    gradients = []
    for slots in (1, 1024):
        made = small.model(small.config(tmp_path))
        for batch in row_layout.pack(GROUPS, row_slots=slots, batch_slots=slots * 8):
            logs = torch.log_softmax(made.logits(row_layout.chosen_by(made, batch)), -1)
            logs.gather(1, batch.targets[:, None]).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad for parameter in made.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
