"""Where a child computes: on a GPU where torch has one, else on the processor.

The daemon imports no torch and cannot know, so each child decides. ``CUDA_VISIBLE_DEVICES``, which children inherit,
hides GPUs from all of them.
"""

from __future__ import annotations

import torch

from node.workers.child_messages import AUTO


def chosen(device: str, gpu: bool | None = None) -> str:
    """What torch calls the device that is meant: "cuda" or "cpu" for "auto", any other name as it is.

    ``gpu``: whether there is one, where that is known.
    """
    if device != AUTO:
        return device
    return "cuda" if (torch.cuda.is_available() if gpu is None else gpu) else "cpu"
