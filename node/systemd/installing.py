"""A node as a systemd service: of the whole machine (as root), or of one user.

1. There is one unit file, ``systemd/farflung.service``, for systemd 252. ``render`` fills in the program and adds what
   a newer systemd offers; for a user it keeps what a user's manager can do, which is everything but the sandbox.
2. Installing again upgrades in place: unit and program are new, key, data and configuration are what they were.
3. Removing keeps what makes the node: its keys, its configuration, its domain, its log. What peers give back goes.
   Purging removes that as well.
4. The machine's service runs as the user ``farflung``, and so does the ``join`` of its data directory.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import node
from node import config
from node.errors import UserError, os_errors
from node.store.data_directory import DataDirectory

UNIT: Final = "farflung.service"
ACCOUNT: Final = "farflung"
LOST: Final = ("blobs", "versions", "trainer", "work", "control.sock", "lock")
"""What a removed node's folder loses: peers give it back, or it is of no use. Keys, log and genesis stay."""

BACKOFF: Final = ("RestartSteps=8", "RestartMaxDelaySec=300")
BACKOFF_SINCE: Final = 254
"""systemd's version that knows ``BACKOFF``; older ones warn about it."""

_MACHINES_OWN: Final = re.compile(
    r"User|Group|StateDirectory\w*|Wants|After|CapabilityBoundingSet|RemoveIPC|LockPersonality"
    r"|(?:Protect|Private|Restrict|SystemCall)\w+"
)
"""Keys that only the machine's manager can carry out."""
_HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108
"""Folders that the unit's sandbox hides from the machine's service."""


@dataclass(frozen=True, slots=True)
class ServicePlace:
    """Where a service's things lie. ``config`` None: in the data directory."""

    user: bool
    data: Path
    unit: Path
    config: Path | None = None

    @property
    def systemctl(self) -> list[str]:
        """The command that talks to the manager of this service."""
        return ["systemctl", "--user"] if self.user else ["systemctl"]

    @property
    def journal(self) -> str:
        """The command that shows the service's output."""
        return "journalctl --user -u farflung" if self.user else "journalctl -u farflung"


def system_place() -> ServicePlace:
    """The whole machine's service."""
    return ServicePlace(
        user=False,
        data=Path("/var/lib/farflung"),
        unit=Path("/etc/systemd/system") / UNIT,
        config=Path("/etc/farflung/farflung.toml"),
    )


def user_place(environment: Mapping[str, str] = os.environ) -> ServicePlace:
    """The service of the user who runs this."""
    home = environment.get("HOME", "")
    if not home.startswith("/"):
        raise UserError("this user has no home directory", "install for the machine, as root and without --user")
    units = Path(environment.get("XDG_CONFIG_HOME") or f"{home}/.config") / "systemd" / "user"
    return ServicePlace(user=True, data=Path(home) / ".local/share/farflung/node", unit=units / UNIT)


def template() -> str:
    """The unit file: a wheel carries it as data, a checkout has it beside the packages."""
    package = Path(node.__file__).parent
    for path in (package / "data" / "systemd" / UNIT, package.parent / "systemd" / UNIT):
        with suppress(FileNotFoundError):
            return path.read_text(encoding="utf-8")
    raise UserError(f"{UNIT} is missing from this installation", "install Farflung again")


def _quoted(path: Path) -> str:
    """A path as one word of a command line in a unit: systemd expands ``%`` and ``$`` there."""
    text = str(path)
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise UserError(f"{text!r}: a unit file cannot name it", "choose a folder without control characters")
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return text if re.fullmatch(r"[\w./%+@:=,-]+", text) else f'"{text}"'


def render(text: str, place: ServicePlace, program: Path, version: int) -> str:
    """The unit for ``place`` that starts ``program``, for systemd of ``version``."""
    words = [_quoted(program), "run", "--data-dir", _quoted(place.data)]
    if place.config is not None:
        words += ["--config", _quoted(place.config)]
    lines: list[str] = []
    for line in text.splitlines():
        key, equals, _ = line.partition("=")
        if place.user and (line.startswith("#") or (equals and _MACHINES_OWN.fullmatch(key))):
            continue
        if key == "ExecStart":
            line = "ExecStart=" + " ".join(words)
        elif place.user and key == "WantedBy":
            line = "WantedBy=default.target"
        lines.append(line)
        if key == "RestartSec" and version >= BACKOFF_SINCE:
            lines += BACKOFF
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines) + "\n")


def install(
    place: ServicePlace,
    *,
    address: str | None,
    yes: bool,
    prefix: Path = Path(sys.prefix),
    hidden: Sequence[str] = _HIDDEN,
) -> int:
    """Install or upgrade the service, join the domain at ``address`` where one is given, and wait until it serves.

    Returns 0, or the exit code of a ``join`` that did not come about; that command said why.
    """
    version = _manager_version(place)
    program = command_for(place, prefix, hidden)
    owner = None if place.user else _account()
    _make(place.data, 0o700, owner)
    if place.config is not None:
        _make(place.config.parent, 0o755, None)
        if not place.config.exists():
            config.write_template(place.config, {})
            place.config.chmod(0o644)
    genesis = place.data / "genesis"
    if genesis.exists():
        if address is not None:
            # Imported here: the network stack takes a second to load.
            from node.domain import invitation, joining

            wanted = invitation.parse(address).domain
            joining.require_same(DataDirectory(place.data), wanted, "remove it with --purge first")
            _say(f"this node joined already (in {place.data}): the address is not needed again")
    elif address is None:
        raise UserError(f"{place.data}: no domain was joined yet", "name a peer's address: --join ADDRESS")
    elif code := _join(place, program, owner, address, yes=yes):
        return code
    _make(place.unit.parent, 0o755, None)
    with os_errors(place.unit, "cannot be written", "check its rights and the room"):
        place.unit.write_text(render(template(), place, program, version), encoding="utf-8")
        place.unit.chmod(0o644)
    _systemctl(place, "daemon-reload")
    _systemctl(place, "enable", UNIT)
    _say("starting the service; this returns when it serves")
    try:
        _systemctl(place, "restart", UNIT)
    except UserError:
        raise UserError(
            f"the service did not start: {_last_words(place)}",
            f"put it right, then: {' '.join(place.systemctl)} restart farflung (its output: {place.journal})",
        ) from None
    _say(f"it serves; its output: {place.journal}")
    if place.user and not Path(f"/var/lib/systemd/linger/{_login()}").exists():
        _say(
            f"it ends when you log out, and starts when you log in; to keep it: sudo loginctl enable-linger {_login()}"
        )
    return 0


def remove(place: ServicePlace, *, purge: bool) -> None:
    """Stop and remove the service. Without ``purge`` the data directory keeps all but ``LOST``."""
    if not place.user:
        _require_root()
    if place.unit.exists():
        if _manager_runs(place):
            _systemctl(place, "disable", "--now", UNIT)
        _delete(place.unit)
        _delete(place.unit.with_name(UNIT + ".d"))
        if _manager_runs(place):
            _systemctl(place, "daemon-reload")
    if DataDirectory(place.data).holder() is not None:  # one that was started by hand
        raise UserError(f"{place.data}: a daemon still runs on it", "stop it, then try again")
    if purge:
        _delete(place.data)
        if place.config is not None:
            _delete(place.config.parent)
        if not place.user and _exists(ACCOUNT):
            _run(["userdel", ACCOUNT], "the user farflung could not be removed")
        _say(f"removed the service, its key and all its data ({place.data})")
        return
    for name in LOST:
        _delete(place.data / name)
    if (place.data / "identity.key").exists():
        _say(f"removed the service; kept in {place.data}: the node's keys, its domain, its log and known peers")


def _say(text: str) -> None:
    print(f"farflung: {text}", file=sys.stderr, flush=True)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise UserError("the machine's service is root's to install or remove", "use sudo, or --user for your own")


def _manager_runs(place: ServicePlace) -> bool:
    if not place.user:
        return Path("/run/systemd/system").is_dir()
    done = subprocess.run(
        [*place.systemctl, "show-environment"], env=_environment(), capture_output=True, stdin=subprocess.DEVNULL
    )
    return done.returncode == 0


def _manager_version(place: ServicePlace) -> int:
    """systemd's version. Raises ``UserError`` where no systemd of ``place`` runs."""
    if not place.user:
        _require_root()
    if shutil.which("systemctl") is None or not _manager_runs(place):
        if place.user and shutil.which("systemctl") is not None:
            raise UserError(
                "this user has no systemd", "log in as this user (sudo and su do not), or run farflung join"
            )
        raise UserError("no systemd runs on this machine", "without it start the node with: farflung join ADDRESS")
    found = re.match(r"systemd (\d+)", _run(["systemctl", "--version"], "systemd does not tell its version"))
    return int(found[1]) if found else 0


def command_for(place: ServicePlace, prefix: Path, hidden: Sequence[str] = _HIDDEN) -> Path:
    """The command ``farflung`` of the environment ``prefix``; the machine's service sees no ``hidden`` folder.

    Raises ``UserError`` where the service could not run it.
    """
    program = prefix / "bin" / "farflung"
    if not os.access(program, os.X_OK):
        raise UserError(f"{program} is missing", "install Farflung again")
    if not place.user:
        for path in (prefix, Path(sys.base_prefix), Path(node.__file__).parent):
            for form in (path, path.resolve()):
                if any(form.is_relative_to(folder) for folder in hidden):
                    raise UserError(
                        f"Farflung is installed in {form}, which the service cannot see",
                        "let the script install it for the machine: bootstrap.sh join ADDRESS --service",
                    )
    return program


def _exists(account: str) -> bool:
    try:
        pwd.getpwnam(account)
    except KeyError:
        return False
    return True


def _account() -> tuple[int, int]:
    """User and group id that the machine's service runs with; the account is made where it is missing."""
    if not _exists(ACCOUNT):
        words = ["useradd", "--system", "--user-group", "--home-dir", "/var/lib/farflung", "--no-create-home"]
        shell = "/usr/sbin/nologin" if os.path.exists("/usr/sbin/nologin") else "/bin/false"
        _run([*words, "--shell", shell, ACCOUNT], "the user farflung could not be made")
    found = pwd.getpwnam(ACCOUNT)
    return found.pw_uid, found.pw_gid


def _login() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _environment() -> dict[str, str]:
    """The environment with the place of the user's manager, which a login by ``su`` does not set."""
    runtime = f"/run/user/{os.geteuid()}"
    return {"XDG_RUNTIME_DIR": runtime, **os.environ} if os.path.isdir(runtime) else dict(os.environ)


def _run(command: Sequence[str], problem: str) -> str:
    try:
        done = subprocess.run(
            command, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise UserError(f"{problem}: {command[0]}: {error.strerror}", "install it, then try again") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"{problem}: {last}")
    return done.stdout


def _systemctl(place: ServicePlace, *words: str) -> None:
    _run([*place.systemctl, *words], f"{' '.join(place.systemctl)} {words[0]} failed")


def _last_words(place: ServicePlace) -> str:
    """The last line that the service itself wrote."""
    which = ["--user", f"_SYSTEMD_USER_UNIT={UNIT}"] if place.user else [f"_SYSTEMD_UNIT={UNIT}"]
    with suppress(UserError):
        lines = _run(["journalctl", "-q", "-n", "1", "-o", "cat", *which], "no journal").strip().splitlines()
        if lines:
            return lines[-1].removeprefix("farflung: ")
    return "it left no line in the journal"


def _join(place: ServicePlace, program: Path, owner: tuple[int, int] | None, address: str, *, yes: bool) -> int:
    """Have the data directory joined, by the user whom it belongs to; the command's exit code."""
    command = [str(program), "join", address, "--no-run", "--data-dir", str(place.data)]
    command += [] if place.config is None else ["--config", str(place.config)]
    command += ["--yes"] if yes else []
    if owner is None:
        return subprocess.run(command).returncode
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": str(place.data)}
    environment |= {name: os.environ[name] for name in ("LANG", "LC_ALL", "TERM", "COLUMNS") if name in os.environ}
    return subprocess.run(
        command, user=owner[0], group=owner[1], extra_groups=(), cwd=place.data, env=environment, umask=0o077
    ).returncode


def _make(folder: Path, mode: int, owner: tuple[int, int] | None) -> None:
    with os_errors(folder, "cannot be made", "check its rights and the room"):
        if not folder.is_dir():
            folder.mkdir(mode=mode, parents=True)
            os.chmod(folder, mode)
            if owner is not None:
                os.chown(folder, *owner)


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be removed ({error.strerror})", "check its rights") from None
