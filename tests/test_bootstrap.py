"""systemd/bootstrap.sh without installing anything: its shell, its refusals, and which commands it gives.

Its world is a PATH with links to the few tools it needs, and with programs of ours in the place of Python, pip, apt-get
and the rest, which note how they were called.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "systemd" / "bootstrap.sh"
SHELL = shutil.which("dash") or "/bin/sh"
TOOLS = (
    "awk",
    "basename",
    "cat",
    "chmod",
    "cp",
    "cut",
    "date",
    "dirname",
    "env",
    "grep",
    "ls",
    "mkdir",
    "mktemp",
    "rm",
    "rmdir",
    "sed",
)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Stands for Python: makes a venv that holds itself, notes what pip is asked for, and answers questions as Python would.
PYTHON = f"""
bin=${{0%/*}}
case "$1 $2" in
    "-m venv") for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; : >"$last/pyvenv.cfg" ;;
    "-m pip")
        shift 2
        [ "$1" = --version ] && exit 0
        echo "pip $*" >>"$NOTES"
        case "$*" in $PIP_FAILS) echo "$PIP_SAYS"; exit 1 ;; esac
        case "$*" in
            *-e*|*farflung*) printf '#!/bin/sh\\necho "farflung $*"\\n' >"$bin/farflung"; chmod +x "$bin/farflung" ;;
            *torch==*) echo 2.13.0+cpu >"$bin/torch" ;;
            *torch*) echo 2.14.1 >"$bin/torch" ;;
        esac ;;
    *importlib.metadata*) cat "$bin/torch" 2>/dev/null ;;
    *importlib.util*) exit 0 ;;
    *) exec "{sys.executable}" "$@" ;;
esac
"""

ADDRESS = "/ip4/192.0.2.1/tcp/4001/p2p/x"


@dataclass
class World:
    """A checkout and the programs that the script finds."""

    checkout: Path
    bin: Path
    notes: Path

    def program(self, name: str, text: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f"#!{SHELL}\n{text}\n")
        (self.bin / name).chmod(0o755)

    def disk(self, megabytes: int) -> None:
        """So much is free where Farflung is installed, and nothing anywhere else."""
        places = f'"-Pk {self.checkout}" | "-Pk {self.home}"'
        rows = f"case $* in {places}) free={megabytes * 1024} ;; *) free=0 ;; esac; echo /dev/x 99999999 50 $free 50% /"
        self.program("df", f"echo Filesystem 1024-blocks Used Available Capacity Mounted on; {rows}")

    @property
    def home(self) -> Path:
        """Where a user without a checkout has Farflung."""
        return self.bin.parent / "home" / ".local" / "share" / "farflung"

    def run(
        self,
        *arguments: str,
        pip_fails: str = "nothing",
        pip_says: str = "",
        piped: bool = False,
        home: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.bin),
            "NOTES": str(self.notes),
            "PIP_FAILS": pip_fails,
            "PIP_SAYS": pip_says,
            "TMPDIR": str(self.bin),
            "HOME": str(self.bin.parent / "home") if home is None else home,
        }
        script = self.checkout / "systemd" / "bootstrap.sh"
        return subprocess.run(
            [SHELL, "-s", "--", *arguments] if piped else [SHELL, str(script), *arguments],
            input=script.read_text() if piped else None,
            # A session of its own has no terminal to ask at.
            start_new_session=True,
            cwd=self.bin.parent if piped else self.checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def noted(self) -> list[str]:
        """The commands noted since the last look."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        self.notes.unlink(missing_ok=True)
        return lines


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A machine that has all that is needed, and a user who is not root."""
    checkout = tmp_path / "farflung"
    (checkout / "systemd").mkdir(parents=True)
    # Whether a driver of NVIDIA's runs on this machine does not matter to the tests.
    driver = "/proc/driver/nvidia/version"
    assert driver in SCRIPT.read_text()
    script = checkout / "systemd" / "bootstrap.sh"
    script.write_text(SCRIPT.read_text().replace(driver, str(tmp_path / "nvidia-driver")))
    (checkout / "pyproject.toml").write_text("[project]\n")
    world = World(checkout, tmp_path / "bin", tmp_path / "notes")
    world.bin.mkdir()
    for tool in (*TOOLS, "sha256sum", "tail"):
        found = shutil.which(tool)
        assert found is not None, tool
        (world.bin / tool).symlink_to(found)
    world.program("uname", 'case "$1" in -s) echo Linux ;; *) echo x86_64 ;; esac')
    world.disk(9000)
    world.program("id", "echo 1000")
    world.program("gcc", "exit 0")
    world.program("bwrap", "exit 0")
    world.program("apt-get", 'echo "apt-get $*" >>"$NOTES"')
    world.program("nvidia-smi", "exit 1")
    world.program("python3.11", PYTHON)
    return world


def test_the_shell_accepts_it() -> None:
    subprocess.run([SHELL, "-n", str(SCRIPT)], check=True, timeout=10)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_accepts_it() -> None:
    subprocess.run(["shellcheck", "-s", "sh", str(SCRIPT)], check=True, timeout=60)


def test_a_truncated_copy_does_nothing(world: World) -> None:
    lines = SCRIPT.read_text().splitlines(keepends=True)
    assert lines[-1].startswith("main ")
    before = sorted(world.checkout.rglob("*"))
    for count in range(len(lines)):
        (world.checkout / "systemd" / "bootstrap.sh").write_text("".join(lines[:count]))
        done = world.run("devnet")
        assert done.stdout == "", f"{count} lines"
        assert "farflung:" not in done.stderr, f"{count} lines"
    assert sorted(world.checkout.rglob("*")) == before
    assert world.noted() == []


def test_without_arguments_it_tells_how_it_is_used(world: World) -> None:
    done = world.run()
    assert done.returncode == 2
    for command in ("join ADDRESS", "uninstall [--purge]", "devnet", "test [--all]"):
        assert f"bootstrap.sh {command}" in done.stderr


@pytest.mark.parametrize(
    ("system", "machine", "words"),
    [("Darwin", "arm64", "runs on Linux; this is Darwin"), ("Linux", "riscv64", "this machine is riscv64")],
)
def test_another_machine_gets_one_clear_line(world: World, system: str, machine: str, words: str) -> None:
    world.program("uname", f'case "$1" in -s) echo {system} ;; *) echo {machine} ;; esac')
    done = world.run("devnet")
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_user_is_told_the_one_line_to_run_before_anything_is_downloaded(world: World) -> None:
    for name in ("gcc", "bwrap"):
        (world.bin / name).unlink()
    done = world.run("devnet")
    assert done.returncode == 2
    assert done.stderr == "farflung: run this first: sudo apt-get install -y gcc libgmp-dev bubblewrap\n"
    assert world.noted() == []
    assert not (world.checkout / ".venv").exists()


def test_root_gets_what_is_missing_installed(world: World) -> None:
    (world.bin / "bwrap").unlink()
    world.program("id", "echo 0")
    world.program(
        "apt-get", f'echo "apt-get $*" >>"$NOTES"; case "$*" in *install*) cp {world.bin}/gcc {world.bin}/bwrap ;; esac'
    )
    done = world.run("devnet")
    assert done.returncode == 0, done.stderr
    update, install, *rest = world.noted()
    assert update.endswith("update")
    assert install.endswith("install -y --no-install-recommends bubblewrap")
    assert rest
    assert all(line.startswith("pip ") for line in rest)


def test_without_a_python_its_packages_are_named(world: World) -> None:
    (world.bin / "python3.11").unlink()
    done = world.run("devnet")
    assert done.returncode == 2
    assert "sudo apt-get install -y python3 python3-venv python3-dev" in done.stderr


def test_without_apt_the_needs_are_told_in_words(world: World) -> None:
    (world.bin / "apt-get").unlink()
    (world.bin / "bwrap").unlink()
    done = world.run("devnet")
    assert done.returncode == 2
    assert "bubblewrap" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_full_disk_is_told_before_anything_is_downloaded(world: World) -> None:
    world.disk(2499)
    done = world.run("devnet")
    assert done.returncode == 2
    assert f"needs 2500 MB in {world.checkout} and 2499 MB are free" in done.stderr
    assert world.noted() == []
    world.disk(2500)
    assert world.run("devnet").returncode == 0


def test_a_gpu_needs_more_room_and_what_is_installed_needs_little(world: World) -> None:
    world.program("nvidia-smi", "echo 'GPU 0: H200'")
    world.disk(8999)
    assert "needs 9000 MB" in world.run("devnet").stderr
    torch = world.checkout / ".venv" / "lib" / "python3.11" / "site-packages" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (world.checkout / ".venv" / "pyvenv.cfg").touch()
    world.disk(499)
    assert "needs 500 MB" in world.run("devnet").stderr
    world.disk(500)
    assert world.run("devnet").returncode == 0


def test_a_second_run_installs_nothing(world: World) -> None:
    first = world.run("devnet", "--steps", "3")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "farflung devnet --steps 3\n"
    assert len(world.noted()) == 2
    assert not list(world.bin.glob("farflung-bootstrap.*"))  # the log goes where all went well
    second = world.run("devnet")
    assert second.returncode == 0
    assert second.stderr == ""
    assert world.noted() == []


def test_changed_requirements_install_again(world: World) -> None:
    world.run("--version")
    world.noted()
    (world.checkout / "pyproject.toml").write_text('[project]\nname = "farflung"\n')
    assert world.run("--version").returncode == 0
    assert any("-e" in line for line in world.noted())


def test_an_interrupted_installation_resumes(world: World) -> None:
    failed = world.run("devnet", pip_fails="*-e*")
    assert failed.returncode == 2
    assert "run the same command again" in failed.stderr
    # What pip had only begun to write is taken away, because pip itself would count it as installed.
    cut_short = world.checkout / ".venv" / "lib" / "python3.11" / "site-packages" / "rich-1.dist-info"
    cut_short.mkdir(parents=True)
    (cut_short / "METADATA").write_text("")
    world.noted()
    assert world.run("devnet").returncode == 0
    assert [line for line in world.noted() if "torch" in line.partition("-e")[0].replace("constraints", "")] == []
    assert not cut_short.exists()


def test_no_gpu_means_no_cuda_build(world: World) -> None:
    world.run("devnet")
    torch, farflung = world.noted()
    assert torch == "pip install --no-deps torch==2.13.0+cpu"
    assert "-c " in farflung
    assert (world.checkout / ".venv" / "constraints.txt").read_text() == "torch==2.13.0+cpu\n"


def test_an_index_without_the_cpu_build_sends_to_the_one_that_has_it(world: World) -> None:
    done = world.run("devnet", pip_fails="*--no-deps?torch*")
    assert done.returncode == 0, done.stderr
    assert world.noted()[1] == f"pip install --no-deps --index-url {CPU_INDEX} torch==2.13.0+cpu"


@pytest.mark.parametrize("sign", ["command", "driver"])
def test_a_gpu_gets_the_ordinary_build(world: World, sign: str) -> None:
    if sign == "command":
        world.program("nvidia-smi", "echo 'GPU 0: H200'")
    else:
        (world.bin.parent / "nvidia-driver").touch()
    done = world.run("devnet")
    assert done.returncode == 0, done.stderr
    assert world.noted()[0] == "pip install torch>=2.9,<3"
    assert (world.checkout / ".venv" / "constraints.txt").read_text() == "torch==2.14.1\n"


def test_the_only_host_it_names_is_pytorchs() -> None:
    hosts = {word for word in re.findall(r"://([^/\s]*)", SCRIPT.read_text()) if "*" not in word}
    assert hosts == {"download.pytorch.org"}


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("Temporary failure in name resolution", "no network: the packages could not be fetched"),
        ("OSError: [Errno 28] No space left on device", "no space was left on the disk"),
    ],
)
def test_what_stopped_pip_is_one_clear_line(world: World, says: str, words: str) -> None:
    done = world.run("devnet", pip_fails="*torch*", pip_says=says)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"farflung: {words}")
    assert says not in done.stderr


def test_a_python_that_is_too_old_is_named(world: World) -> None:
    (world.bin / "python3.11").unlink()
    world.program("python3", 'case "$*" in *importlib*) exit 1 ;; *) echo 3.9 ;; esac')
    done = world.run("devnet")
    assert done.returncode == 2
    assert "python3 is Python 3.9, and Farflung needs Python 3.11 or newer" in done.stderr
    assert done.stderr.count("\n") == 1


def test_through_a_pipe_it_installs_from_the_index_into_the_home(world: World) -> None:
    done = world.run("join", ADDRESS, "--yes", piped=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"farflung join {ADDRESS} --yes\n"
    assert world.noted()[-1] == f"pip install -c {world.home}/venv/constraints.txt --upgrade farflung"
    assert not (world.checkout / ".venv").exists()


@pytest.mark.parametrize("words", [(), ("--yes",), ("12D3KooW", "--yes"), ("12D3KooW", "--service")])
def test_a_wrong_address_is_told_before_anything_is_installed(world: World, words: tuple[str, ...]) -> None:
    done = world.run("join", *words, piped=True)
    assert done.returncode == 2
    assert done.stderr.startswith("farflung: join takes the address of a node")
    assert world.noted() == []
    assert not world.home.exists()


def test_without_a_home_there_is_one_clear_line(world: World) -> None:
    for command in ("status", "uninstall"):
        done = world.run(command, piped=True, home="")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "HOME is not set" in done.stderr


def test_a_wheel_is_a_source(world: World) -> None:
    wheel = world.bin.parent / "farflung-1-py3-none-any.whl"
    wheel.write_bytes(b"one")
    for _ in range(2):
        assert world.run("join", "--source", str(wheel), ADDRESS, piped=True).returncode == 0
    assert [line for line in world.noted() if "whl" in line] == [
        f"pip install -c {world.home}/venv/constraints.txt {wheel}",
        f"pip install --force-reinstall --no-deps {wheel}",
    ]  # the second run installed nothing
    wheel.write_bytes(b"two")
    assert world.run("--source", str(wheel), "status", piped=True).stdout == "farflung status\n"
    assert world.noted() != []


def test_a_folder_and_an_index_are_sources(world: World) -> None:
    assert world.run("join", f"--source={world.checkout}", ADDRESS, piped=True).returncode == 0
    assert any(line.endswith(f"constraints.txt {world.checkout}") for line in world.noted())
    assert world.run("join", "--source", "file:///index", ADDRESS, piped=True).returncode == 0
    assert any(line.endswith("--upgrade farflung") for line in world.noted())


@pytest.mark.parametrize("source", ["/nowhere/farflung.whl", "/"])
def test_a_source_that_is_none_is_refused(world: World, source: str) -> None:
    done = world.run("join", "--source", source, ADDRESS, piped=True)
    assert done.returncode == 2
    assert f"--source {source}" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("systemctl", ["exit 1", None])
def test_a_service_without_systemd_is_refused_before_anything_is_installed(world: World, systemctl: str | None) -> None:
    if systemctl is not None:
        world.program("systemctl", systemctl)
    done = world.run("join", ADDRESS, "--service", piped=True)
    assert done.returncode == 2
    assert "systemd" in done.stderr
    assert done.stderr.count("\n") == 1
    assert world.noted() == []


def test_a_users_service_is_the_commands_work(world: World) -> None:
    world.program("systemctl", "exit 0")
    done = world.run("join", ADDRESS, "--yes", "--service", piped=True)
    assert done.stdout == f"farflung service install --user --join {ADDRESS} --yes\n"
    assert world.run("join", "--service", "--threads=2", piped=True).returncode == 2


def test_uninstalling_takes_the_program_away(world: World) -> None:
    assert world.run("--version", piped=True).returncode == 0
    (world.home / "node").mkdir()
    done = world.run("uninstall", "--purge", piped=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "farflung service remove --user --purge\n"
    assert {path.name for path in world.home.iterdir()} == {"node"}
    again = world.run("uninstall", piped=True)
    assert again.returncode == 0
    assert "not installed" in again.stderr


@pytest.mark.parametrize("failing", ["ruff", "mypy", "none"])
def test_the_tests_end_with_pytest_whatever_failed_before(world: World, failing: str) -> None:
    assert world.run("--version").returncode == 0
    for tool in ("ruff", "mypy"):
        program = world.checkout / ".venv" / "bin" / tool
        program.write_text(f"#!/bin/sh\necho {tool} $1\n" + ("exit 1\n" if tool == failing else ""))
        program.chmod(0o755)
    python = world.checkout / ".venv" / "bin" / "python"
    python.write_text(
        python.read_text().replace("*importlib", '"-m pytest") shift 2; echo "pytest $*" ;;\n    *importlib', 1)
    )
    done = world.run("test", "--all", "tests/x.py")
    assert done.returncode == (0 if failing == "none" else 1), done.stderr
    spread = "-n logical --maxprocesses 4"
    assert done.stdout.splitlines() == ["ruff check", "ruff format", "mypy node", f"pytest {spread} -m  tests/x.py"]
    # What is given comes last, so that it goes before what the script says: -n 0 as well.
    last = world.run("test", "-n", "0", "-k", "y").stdout.splitlines()[-1]
    assert last == f"pytest {spread} -m not slow and not root and not gpu -n 0 -k y"


def test_this_interpreter_satisfies_it() -> None:
    """The words of python_lacks run on a real interpreter."""
    text = SCRIPT.read_text()
    code = text[text.index('    "$1" -c \'') :].split("'")[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    assert set(done.stdout.split()) <= {"venv", "headers"}
