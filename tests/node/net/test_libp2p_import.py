"""libp2p is imported without the libraries of what a node never uses, and nobody else notices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import node
from node.net import libp2p_import

ROOT = Path(node.__file__).resolve().parents[1]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_daemon_loads_none_of_them() -> None:
    names = sorted(libp2p_import.UNUSED | {"rich", "urllib3"})
    out = run(f"import sys, node.daemon, libp2p; print(*(name for name in {names} if name in sys.modules))")
    assert out.strip() == ""


def test_who_imports_one_later_gets_the_real_one() -> None:
    out = run("import node.net.host, httpx; print(httpx.Client().timeout.connect)")
    assert out.split() == ["5.0"]


def test_who_imported_one_before_keeps_it() -> None:
    out = run("import httpx; before = httpx; import node.net.host, sys; print(sys.modules['httpx'] is before)")
    assert out.strip() == "True"


def test_a_placeholder_can_be_used_at_import_and_not_later() -> None:
    code = """
from node.net import libp2p_import
with libp2p_import.placeholders():
    import aioquic.quic.connection as quic
    made = quic.Connection(1)
    class Own(quic.Connection):
        pass
    kind: quic.Connection | None = None
try:
    raise ValueError
except quic.Error:
    raise SystemExit("caught by a placeholder")
except ValueError:
    pass
for call in (quic.Connection, made.connect):
    try:
        call()
    except RuntimeError as error:
        print(error)
Own()
"""
    lines = run(code).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "aioquic.quic.connection.Connection is not loaded",
        "aioquic.quic.connection.Connection().connect is not loaded",
    ]


def test_installing_twice_installs_once() -> None:
    out = run("""
import sys
before = len(sys.meta_path)
from node.net import libp2p_import
once = len(sys.meta_path)
libp2p_import.install()
print(once - before, len(sys.meta_path) - once)
""")
    assert out.split() == ["1", "0"]
