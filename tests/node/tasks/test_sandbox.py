from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.tasks import sandbox

needs_sandbox = pytest.mark.skipif(sandbox.available() is not None, reason=str(sandbox.available()))


def run(code: str, *readable: Path) -> dict[str, object]:
    words = [
        *sandbox.command(readable),
        sys.executable,
        "-P",
        "-c",
        f"import json, os\nreport = {{}}\n{code}\nprint(json.dumps(report))",
    ]
    output = subprocess.run(words, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert output.returncode == 0, output.stderr
    report: dict[str, object] = json.loads(output.stdout)
    return report


@needs_sandbox
def test_what_is_seen(tmp_path: Path) -> None:
    shown, hidden = tmp_path / "shown.jsonl", tmp_path / "hidden.jsonl"
    shown.write_text("shown")
    hidden.write_text("hidden")
    source = Path(sandbox.__file__).resolve().parents[2]
    code = f"""
report["environment"] = dict(os.environ)
report["user"] = os.getuid()
report["shown"] = open({str(shown)!r}).read()
report["hidden"] = os.path.exists({str(hidden)!r})
report["source"] = sorted(os.listdir({str(source)!r}))
report["home"] = [place for place in ("/etc/shadow", "/etc/passwd", "/var", "/run") if os.path.exists(place)]
report["processes"] = os.path.exists("/proc/1")
import node.tasks.reasoning_tasks, importlib.util
report["library"] = importlib.util.find_spec("reasoning_gym") is not None
"""
    report = run(code, shown)
    environment = report["environment"]
    assert isinstance(environment, dict)
    assert environment["PYTHONHASHSEED"] == "0"
    assert environment["HOME"] == "/tmp"
    assert not set(environment) & {"USER", "LOGNAME", "SSH_AUTH_SOCK", "TMPDIR"}
    assert report["user"] == 65534
    assert report["shown"] == "shown"
    assert report["hidden"] is False
    assert report["library"] is True
    assert report["home"] == []
    assert report["processes"] is False
    if "site-packages" not in source.parts:
        # Of the source tree, only what the child imports; an environment that lies in it is the interpreter's.
        assert report["source"] in (["node", "proofs", "protocol"], [".venv", "node", "proofs", "protocol"])


@needs_sandbox
def test_nothing_is_written_outside_its_own_memory(tmp_path: Path) -> None:
    shown = tmp_path / "shown.jsonl"
    shown.write_text("shown")
    mark = Path("/tmp") / f"farflung-sandbox-{os.getpid()}"
    places = [str(shown), "/mark", "/usr/mark", str(Path(sandbox.__file__)), str(mark)]
    code = f"""
for place in {places!r}:
    try:
        open(place, "a").close()
        report[place] = "written"
    except OSError as error:
        report[place] = error.errno
"""
    report = run(code, shown)
    assert report.pop(str(mark)) == "written"
    assert set(report) == set(places[:-1])
    assert "written" not in report.values()
    assert not mark.exists()


@needs_sandbox
def test_no_network() -> None:
    code = """
import socket
report["interfaces"] = [name for _, name in socket.if_nameindex()]
try:
    socket.create_connection(("127.0.0.1", 22), timeout=1)
except OSError as error:
    report["error"] = type(error).__name__
"""
    report = run(code)
    assert report == {"interfaces": ["lo"], "error": "ConnectionRefusedError"}


@needs_sandbox
def test_it_ends_with_its_parent() -> None:
    code = (
        "import subprocess, sys\nfrom node.tasks import sandbox\n"
        "code = 'import time; print(1, flush=True); time.sleep(60)'\n"
        "child = subprocess.Popen([*sandbox.command(), sys.executable, '-c', code], stdout=1)\nsys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).resolve().parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"1\n"
        parent.kill()
        # The pipe ends when the last process that holds it, the one in the sandbox, is gone.
        assert parent.stdout.read() == b""


def test_paths_that_lie_in_another_are_bound_once() -> None:
    paths = [Path("/a/b/c"), Path("/a/b"), Path("/a/bc"), Path("/a/b")]
    assert sandbox._bound(paths) == [Path("/a/b"), Path("/a/bc")]


def test_links_to_the_interpreter_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("")
    (tmp_path / "middle").symlink_to("real")
    (tmp_path / "first").symlink_to(tmp_path / "middle")
    assert list(sandbox._links(tmp_path / "first")) == [tmp_path / "first", tmp_path / "middle", tmp_path / "real"]
    (tmp_path / "loop").symlink_to("loop")
    assert list(sandbox._links(tmp_path / "loop")) == [tmp_path / "loop"]


def test_what_is_said_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert sandbox.available() == f"there is no sandbox: {sandbox.REMEDY}"


def test_what_is_said_where_it_does_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    reason = "the sandbox does not work here: bwrap: No permissions to create new namespace"
    assert sandbox.available() == reason
