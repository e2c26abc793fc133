"""Importing libp2p without the libraries of the parts of it that a node never uses.

libp2p 0.8.1 imports all of its transports, discoveries and helpers at once: QUIC, WebSocket, mDNS, UPnP, certificates
by ACME, metrics. With their libraries that is a quarter of a daemon's start and of its memory, for nothing: ``guard``
builds a host of TCP, Noise and Yamux alone.

1. While libp2p's own ``__init__`` runs, and only then, the names in ``UNUSED`` import as placeholders, unless the real
   module is loaded already. Afterwards they are gone from ``sys.modules``: who imports one later gets the real one.
2. A placeholder's attributes are classes, so that libp2p can subclass, annotate and catch them. Called while libp2p is
   imported they give further placeholders; called later they fail, with a message that names them: nothing runs on a
   placeholder by accident.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, Final

PACKAGE: Final = "libp2p"
UNUSED: Final = frozenset(
    {
        *("aioquic", "httpx", "miniupnpc", "prometheus_client", "requests", "service_identity"),
        *("trio_websocket", "wsproto", "zeroconf"),
    }
)
_loading = 0
"""How many blocks of ``placeholders`` are open."""


class _Placeholder(type):
    """The type of a placeholder's attributes: has every attribute, and no instances."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make(f"{cls.__qualname__}.{name}")

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if cls.__dict__.get("_placeholder"):
            if _loading:
                return _make(f"{cls.__qualname__}()")
            raise RuntimeError(f"{cls.__qualname__} is not loaded: a Farflung node does not use it")
        return super().__call__(*arguments, **options)


def _make(name: str) -> type:
    # An exception class, so that "except" takes it as well.
    return _Placeholder(name.rpartition(".")[2], (Exception,), {"_placeholder": True, "__qualname__": name})


class _Module(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _make(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _PlaceholderLoader(Loader):
    """Loads a placeholder."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _PackageLoader(SourceFileLoader):
    """Runs libp2p's ``__init__`` amid placeholders."""

    def exec_module(self, module: ModuleType) -> None:
        with placeholders():
            super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds libp2p, and while it is loaded a placeholder for every name in or below ``UNUSED``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _loading and fullname.partition(".")[0] in UNUSED:
            return ModuleSpec(fullname, _PlaceholderLoader(), is_package=True)
        spec = PathFinder.find_spec(fullname, path, target) if fullname == PACKAGE else None
        if spec is not None and spec.origin is not None:
            spec.loader = _PackageLoader(fullname, spec.origin)
        return spec


@contextmanager
def placeholders() -> Iterator[None]:
    """Let ``UNUSED`` import as placeholders inside the block."""
    global _loading
    _loading += 1
    try:
        yield
    finally:
        _loading -= 1
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
            del sys.modules[name]


def install() -> None:
    """From now on libp2p is imported so, whoever imports it. Costs nothing by itself."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
