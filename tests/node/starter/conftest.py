"""Several threads on a busy machine wait for each other by spinning: a hundred times slower for models this small."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
