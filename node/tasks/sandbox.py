"""The sandbox that the tasks child runs in: a bubblewrap command line, and whether it works here.

1. No network, no other process in sight, no home, no capabilities, a session of its own; it dies with its parent.
2. To be seen, read-only: ``/usr`` and the libraries beside it, Python and its packages, Farflung's own packages (not
   the folder they lie in, where a run's keys may be), and the files that the caller names. ``/tmp`` lies in memory.
   They are the host's own files, no copies: ``node.tasks.seccomp`` refuses the leases and locks that a read-only mount
   allows, so nobody on the host waits for what runs inside.
3. The environment is cleared, with PYTHONHASHSEED=0.
4. ``available`` runs the real command line once, because a distribution or a container may forbid user namespaces.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import node
from node.workers.child_process import child_environment

REMEDY = "install bubblewrap (Debian and Ubuntu: apt-get install bubblewrap)"
TMP_BYTES = 64 << 20
_PROBE_SECONDS = 20
_PACKAGES = ("node", "proofs", "protocol")
# Links into /usr on a merged system, folders of their own elsewhere; what is missing is left out.
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
_EMPTY_PLACES = ("/", "/tmp", "/usr", "/etc", "/home", "/root", "/var", "/opt", "/srv", "/mnt")  # noqa: S108
SEALED = ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--")
"""How the command line of a sandbox ends: nothing can be written to."""


def _links(path: Path) -> Iterable[Path]:
    """``path`` and every link that it leads through."""
    seen: set[Path] = set()
    while path not in seen:
        seen.add(path)
        yield path
        if path.is_symlink():
            path = Path(os.path.normpath(path.parent / os.readlink(path)))


def _python_paths() -> list[Path]:
    """What the interpreter needs: its prefixes, its program with all links to it, its packages."""
    source = Path(node.__file__).resolve().parents[1]
    paths = [Path(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix, sys.prefix)]
    paths += _links(Path(sys.executable))
    paths += [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    # From a source tree its packages alone: a run's data directories may lie beside them.
    paths += [source / package for package in _PACKAGES if (source / package).is_dir()]
    return [path for path in paths if path.exists() and str(path) not in _EMPTY_PLACES]


def _bound(paths: Iterable[Path]) -> list[Path]:
    """``paths`` without those that lie in another one, in an order in which none hides another."""
    kept: list[Path] = []
    for path in sorted(set(paths), key=lambda path: (len(path.parts), path)):
        if not any(path.is_relative_to(above) for above in kept):
            kept.append(path)
    return kept


def confined(environment: Mapping[str, str]) -> list[str]:
    """How the command line of a sandbox with this ``environment`` begins (rules 1 and 3)."""
    line = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    line += ["--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
    for name, value in environment.items():
        line += ["--setenv", name, value]
    return line


def shown(paths: Iterable[str]) -> list[str]:
    """What shows system ``paths`` in a sandbox, as the links that they are or read-only."""
    line: list[str] = []
    for path in paths:
        if Path(path).is_symlink():
            line += ["--symlink", os.readlink(path), path]
        elif Path(path).exists():
            line += ["--ro-bind", path, path]
    return line


def command(readable: Sequence[Path] = ()) -> list[str]:
    """What goes before a command line to run it sandboxed. ``readable`` are further files it may read."""
    environment = child_environment({"HOME": "/tmp", "PATH": "/usr/bin:/bin", "TZ": "UTC"})  # noqa: S108
    environment["SYMPY_GROUND_TYPES"] = "python"  # gmpy2 or flint, where one is installed, would order terms otherwise
    for name in ("TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"):
        environment.pop(name, None)
    line = confined(environment)
    if _version() >= (0, 7):
        line += ["--size", str(TMP_BYTES)]
    line += ["--tmpfs", "/tmp", "--dev", "/dev"]  # noqa: S108  mounted first: Python may lie in /tmp
    line += shown(_SYSTEM)
    system = [Path(path) for path in _SYSTEM]
    for place in _bound([*_python_paths(), *(Path(os.path.abspath(file)) for file in readable)]):
        if not any(place.is_relative_to(above) for above in system):
            line += ["--ro-bind", str(place.resolve()), str(place)]
    return [*line, *SEALED]


@functools.cache
def _version() -> tuple[int, ...]:
    try:
        output = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, timeout=_PROBE_SECONDS).stdout  # noqa: S607
        return tuple(int(part) for part in output.split()[-1].split("."))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()


def available() -> str | None:
    """None where the sandbox works, else why it does not, with the remedy. Starts a process once; blocks for it."""
    program = shutil.which("bwrap")
    if program is None:
        return f"there is no sandbox: {REMEDY}"
    try:
        return _probed(program)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the sandbox does not work here: {error}"


@functools.cache
def _probed(program: str) -> str | None:
    """What trying bubblewrap's ``program`` once says; an exception, which may be the moment's fault, is not kept."""
    probe = subprocess.run(
        [*command(), sys.executable, "-P", "-c", "import node.tasks"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=_PROBE_SECONDS,
    )
    if probe.returncode == 0:
        return None
    return f"the sandbox does not work here: {last_line(probe.stderr, f'exit code {probe.returncode}')}"


def last_line(output: bytes, silent: str) -> str:
    """The end of what a program said, or ``silent`` where that is nothing."""
    return (output.decode("utf-8", "replace").strip().splitlines() or [silent])[-1].strip()[:200]
