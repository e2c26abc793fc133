"""How the daemon starts several processes of a child through torchrun. Imports no torch.

1. The processes meet in files of a folder of their own (``node.workers.sharding``): nothing listens for a rendezvous.
2. torchrun ends all processes when one dies, and none is started again: the role begins anew with the child.
"""

from __future__ import annotations

from pathlib import Path


def command(python: str, processes: int, folder: Path) -> list[str]:
    """The command line before the child's own. ``folder`` must be empty, and its name goes to the child as well."""
    return [
        *(python, "-P", "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(processes), "--max-restarts", "0", "--monitor-interval", "0.2"),
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(folder / "rendezvous")),
        *("--local-addr", "127.0.0.1", "--log-dir", str(folder / "log"), "--no-python"),
    ]
