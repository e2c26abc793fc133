"""Does torch work here? Runs a small kernel on every device and prints one line of JSON. A program of its own::

    python -P -m node.workers.torch_probe

``{"torch": version, "cuda_build": version or null, "cpu": error or null, "devices": [{"name", "memory_mb", "error"}],
"cuda_error": text or null}``. An error is one line.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

SIZE = 64
"""Rows of the matrices multiplied: small, and still a real kernel of the device's own library."""


def kernel(device: str) -> str | None:
    """Multiply two matrices on ``device`` and take the gradient; what went wrong, or None."""
    import torch

    try:
        left = torch.arange(SIZE * SIZE, dtype=torch.float32, device=device).reshape(SIZE, SIZE) / (SIZE * SIZE)
        left.requires_grad_()
        product = (left @ torch.eye(SIZE, device=device)).sum()
        (slope,) = torch.autograd.grad(product, left)
        if not bool((slope == 1).all()):
            return "it computes wrong results"
    except Exception as error:
        return _line(error)
    return None


def probe() -> dict[str, Any]:
    """What torch is and does here."""
    import torch

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "cpu": kernel("cpu"),
        "devices": [],
        "cuda_error": None,
    }
    if torch.version.cuda is None:
        return found
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if not torch.cuda.is_available():
                found["cuda_error"] = _line(warned[0].message) if warned else "torch sees no GPU"
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found["devices"].append(
                {
                    "name": properties.name,
                    "memory_mb": properties.total_memory >> 20,
                    "error": kernel(f"cuda:{index}"),
                }
            )
    except Exception as error:
        found["cuda_error"] = _line(error)
    return found


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


if __name__ == "__main__":
    print(json.dumps(probe()))
