#!/bin/sh
# Installs Farflung and runs it: into ./.venv beside its sources, else into ~/.local/share/farflung.
# Everything stands in functions and the last line calls main, so a truncated copy of this file does nothing.

set -eu

# The CPU build of torch that machines without an NVIDIA GPU get: plain "torch" would bring gigabytes of CUDA.
TORCH_CPU="2.13.0+cpu"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

# What pip and apt-get say where the other side cannot be reached.
NO_NETWORK="name resolution|Name or service not known|Network is unreachable|No route to host|Failed to establish a new connection|Temporary failure resolving|Could not connect to|timed out"

NO_ADDRESS="join takes the address of a node, such as /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…"

say() {
    printf 'farflung: %s\n' "$*" >&2
}

fail() {
    say "$@"
    exit 2
}

usage() {
    cat >&2 <<'TEXT'
Installs Farflung (into ./.venv in its sources, else into ~/.local/share/farflung) and runs it:

  bootstrap.sh join ADDRESS [--yes]        takes part in the domain of the node at ADDRESS
  bootstrap.sh join ADDRESS --service      the same as a systemd service; as root the machine's (user farflung,
                                           /opt/farflung, /var/lib/farflung), else your own. Again: upgrades it
  bootstrap.sh uninstall [--purge]         removes program and service; --purge the node's key and data as well
  bootstrap.sh devnet [arguments]          a whole network on this machine
  bootstrap.sh test [--all] [arguments]    ruff, mypy and pytest, in the sources; --all adds slow, root and gpu
  bootstrap.sh COMMAND [arguments]         any other command of farflung

--source SOURCE in front of the command, or behind join: install from a folder of sources, a wheel file, or the URL of
a package index. FARFLUNG_PYTHON names the Python to use instead of the first fitting one.
TEXT
    exit 2
}

# Runs a phase of the installation with its output in the log; shows the end of the log where it fails.
phase() {
    title=$1
    shift
    say "$title"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        if grep -q "No space left on device" "$log"; then
            fail "no space was left on the disk while $title (whole output: $log); make room and run the same command again: it resumes."
        elif grep -Eq "$NO_NETWORK" "$log"; then
            fail "no network: the packages could not be fetched while $title (whole output: $log); run the same command again when there is one: it resumes."
        fi
        tail -n 15 "$log" >&2
        fail "this failed: $title (whole output: $log). Put it right and run the same command again: it resumes."
    fi
}

# Prints what the Python "$1" lacks, as words of "venv headers"; fails where it is no usable Python at all.
python_lacks() {
    "$1" -c '
import importlib.util, os, sys, sysconfig
if sys.version_info < (3, 11) or "musl" in str(sysconfig.get_config_var("SOABI")):
    sys.exit(1)
words = []
if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
    words.append("venv")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    words.append("headers")
print(*words)
' 2>/dev/null
}

# Sets python to the first fitting Python that lacks nothing, else to the first fitting one; lacks tells what it lacks.
find_python() {
    python="" lacks=""
    for candidate in ${FARFLUNG_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        words=$(python_lacks "$candidate") || continue
        if [ -z "$python" ] || [ -z "$words" ]; then
            python=$candidate lacks=$words
        fi
        [ -n "$words" ] || return 0
    done
}

# Sets missing to the system packages to install ("" where all is there), by their names on Debian.
find_missing() {
    find_python
    missing=""
    prefix=python3
    if [ -z "$python" ]; then
        [ -z "${FARFLUNG_PYTHON:-}" ] || fail "FARFLUNG_PYTHON=$FARFLUNG_PYTHON is not Python 3.11 or newer on glibc; name one that is."
        # Where the system's own Python is too old, its package brings no newer one.
        version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=""
        [ -z "$version" ] || fail "python3 is Python $version, and Farflung needs Python 3.11 or newer on glibc; install one and name it: FARFLUNG_PYTHON=/path/to/python."
        missing=" python3 python3-venv python3-dev"
    elif [ -n "$lacks" ]; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        base=$("$python" -c 'import sys; print(sys.base_prefix)')
        [ "$base" = /usr ] || fail "$python (in $base) lacks its $lacks, which no system package brings; set FARFLUNG_PYTHON to another Python 3.11 or newer."
        # A Python that is not the system's own default has packages of its own name.
        [ "$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ] || prefix=python$version
        for word in $lacks; do
            case $word in
                venv) missing="$missing $prefix-venv" ;;
                headers) missing="$missing $prefix-dev" ;;
            esac
        done
    fi
    # libp2p needs fastecdsa and miniupnpc, which are compiled: they want a compiler, Python's headers and GMP's.
    if ! command -v gcc >/dev/null 2>&1; then
        missing="$missing gcc"
    fi
    if ! echo '#include <gmp.h>' | gcc -E - >/dev/null 2>&1; then
        missing="$missing libgmp-dev"
    fi
    # Scorers of tasks read text that strangers wrote: they run in bubblewrap's sandbox.
    if ! command -v bwrap >/dev/null 2>&1; then
        missing="$missing bubblewrap"
    fi
    missing=${missing# }
}

# Brings what the system lacks, as root on Debian and its like, or names the one line to run.
check_system() {
    find_missing
    [ -n "$missing" ] || return 0
    if ! command -v apt-get >/dev/null 2>&1; then
        fail "this machine lacks what Debian calls: $missing. Install it with this system's package manager, then run the same command again."
    fi
    if [ "$(id -u)" != 0 ]; then
        fail "run this first: sudo apt-get install -y $missing"
    fi
    phase "asking the system for its list of packages" apt-get -q -o DPkg::Lock::Timeout=120 update
    # shellcheck disable=SC2086  # a list of package names
    phase "installing $missing" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120 \
        install -y --no-install-recommends $missing
    find_missing
    [ -z "$missing" ] || fail "still missing after apt-get: $missing (Farflung needs Python 3.11 or newer: Debian 12, Ubuntu 24.04 or later have it)."
}

check_machine() {
    [ "$(uname -s)" = Linux ] || fail "Farflung runs on Linux; this is $(uname -s)."
    case $(uname -m) in
        x86_64 | aarch64 | arm64) ;;
        *) fail "Farflung runs on x86-64 and aarch64; this machine is $(uname -m)." ;;
    esac
}

check_disk() {
    if [ "$mode" = cpu ]; then need=2500; else need=9000; fi
    # What is already installed needs no room a second time.
    ! ls "$venv"/lib/python3*/site-packages/torch/__init__.py >/dev/null 2>&1 || need=500
    free=$(df -Pk "$base" | awk 'NR == 2 { print int($4 / 1024) }')
    [ "$free" -ge "$need" ] || fail "the installation needs $need MB in $base and $free MB are free; make room there and run the same command again."
}

# cuda where the machine has an NVIDIA GPU with its driver, else cpu.
find_mode() {
    mode=cpu
    if [ -e /proc/driver/nvidia/version ] || { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }; then
        mode=cuda
    fi
}

# What the installation depends on: a change of any of it makes the next run install again.
fingerprint() {
    {
        case $kind in
            checkout) cat "$root/pyproject.toml" "$root/systemd/bootstrap.sh" ;;
            wheel) cat "$source" ;;
            # What these offer is not known before pip asked them.
            *) date +%s%N ;;
        esac
        echo "$kind $base $mode"
        "$venv/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null || echo "no python"
    } | sha256sum | cut -c 1-64
}

installed() {
    [ -f "$venv/.farflung-$1" ] && [ "$(cat "$venv/.farflung-$1")" = "$(fingerprint)" ]
}

pip() {
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 "$venv/bin/python" -m pip "$@"
}

make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        # pip takes a package for installed whose files an interruption cut short: only RECORD is written last.
        for folder in "$venv"/lib/python3*/site-packages/*.dist-info; do
            [ ! -d "$folder" ] || [ -f "$folder/RECORD" ] || rm -r "$folder"
        done
        return 0
    fi
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv is there and is no virtual environment; move it away and run the same command again."
    fi
    phase "making $venv with $("$python" --version)" "$python" -m venv --clear "$venv"
}

torch_version() {
    "$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null
}

install_torch() {
    if [ "$mode" = cuda ]; then
        torch_version >/dev/null || pip install "torch>=2.9,<3" || return 1
    elif [ "$(torch_version)" != "$TORCH_CPU" ]; then
        pip install --no-deps "torch==$TORCH_CPU" ||
            pip install --no-deps --index-url "$TORCH_CPU_INDEX" "torch==$TORCH_CPU" || return 1
    fi
    # Keeps the steps that follow from replacing this build by another.
    echo "torch==$(torch_version)" >"$venv/constraints.txt"
}

install_farflung() {
    case $kind in
        checkout) pip install -c "$venv/constraints.txt" -e "$root$1" ;;
        index) pip install -c "$venv/constraints.txt" --upgrade "farflung$1" ;;
        # The second time for what has the version that is installed already, and is another build of it.
        *) pip install -c "$venv/constraints.txt" "$source$1" && pip install --force-reinstall --no-deps "$source" ;;
    esac && "$venv/bin/farflung" --version
}

# Brings the environment up to date for "$1": base, or test, which adds what the tests need.
install() {
    find_mode
    ! installed "$1" || return 0
    # One installation at a time; the lock ends with this shell's descriptor.
    exec 9<"$base"
    ! command -v flock >/dev/null 2>&1 || flock 9
    if ! installed "$1"; then
        log=$(mktemp "${TMPDIR:-/tmp}/farflung-bootstrap.XXXXXX")
        check_system
        check_disk
        make_venv
        phase "installing torch ($mode)" install_torch
        if [ "$1" = test ]; then
            phase "installing farflung and what its tests need" install_farflung "[test]"
            fingerprint >"$venv/.farflung-test"
        else
            phase "installing farflung" install_farflung ""
        fi
        fingerprint >"$venv/.farflung-base"
        rm -f "$log"
        say "installed into $venv"
    fi
    exec 9<&-
}

run_tests() {
    markers="not slow and not root and not gpu"
    if [ "${1:-}" = --all ]; then
        markers=""
        shift
    fi
    cd "$root"
    status=0
    "$venv/bin/ruff" check . || status=1
    "$venv/bin/ruff" format --check . || status=1
    "$venv/bin/mypy" node proofs protocol tests || status=1
    # pytest comes last, so that its summary is the last line.
    "$venv/bin/python" -m pytest -n logical --maxprocesses 4 -m "$markers" "$@" || status=1
    return "$status"
}

# Sets root to the sources that this script lies in, "" where it came alone (through a pipe, or as a copy).
find_checkout() {
    root=""
    case $0 in
        *bootstrap.sh)
            above=$(CDPATH='' cd -- "$(dirname -- "$0")/.." 2>/dev/null && pwd -P) || return 0
            [ ! -f "$above/pyproject.toml" ] || [ ! -f "$above/systemd/bootstrap.sh" ] || root=$above
            ;;
    esac
}

# Sets kind, and source to what pip takes.
find_source() {
    case $source in
        "") kind=index ;;
        http://* | https://* | file://*)
            kind=index
            PIP_INDEX_URL=$source
            export PIP_INDEX_URL
            ;;
        *)
            [ -e "$source" ] || fail "--source $source is not there; name a folder of Farflung's sources, a wheel file or the URL of a package index."
            folder=$(CDPATH='' cd -- "$(dirname -- "$source")" && pwd -P)
            source=$folder/$(basename -- "$source")
            case $source in
                *.whl) kind=wheel ;;
                *)
                    [ -f "$source/pyproject.toml" ] || fail "--source $source is neither a folder of Farflung's sources nor a wheel file."
                    kind=folder
                    ;;
            esac
            ;;
    esac
}

need_home() {
    [ -n "${HOME:-}" ] || fail "HOME is not set: say where Farflung belongs, such as HOME=/home/you."
}

# Sets base and venv to where "$1" is installed, and makes base.
find_place() {
    if [ "$1" = machine ]; then
        base=/opt/farflung
        # The service's user reads what root installs.
        umask 022
        [ -n "$source" ] || source=$root
        find_source
    elif [ "$1" = command ] && [ -n "$root" ] && [ -z "$source" ]; then
        kind=checkout base=$root venv=$root/.venv
        return 0
    else
        need_home
        base=$HOME/.local/share/farflung
        [ -n "$source" ] || [ "$1" = command ] || source=$root
        find_source
    fi
    venv=$base/venv
    mkdir -p "$base" 2>/dev/null || fail "$base cannot be made; check the rights and the room there."
}

# Becomes the installed command.
start() {
    # Where the shell reads this script from a pipe, a question is asked at the terminal.
    if [ ! -f "$0" ] && [ ! -t 0 ] && (: </dev/tty) 2>/dev/null; then
        exec "$venv/bin/farflung" "$@" </dev/tty
    fi
    exec "$venv/bin/farflung" "$@"
}

# Installs and runs any command but the script's own.
run_command() {
    find_place command
    install base
    start "$@"
}

check_systemd() {
    command -v systemctl >/dev/null 2>&1 || fail "there is no systemd on this machine; leave --service out."
    if [ "$who" = machine ]; then
        [ -d /run/systemd/system ] || fail "systemd does not run on this machine; leave --service out."
    else
        systemctl --user show-environment >/dev/null 2>&1 || fail "no systemd runs for this user; log in as this user (sudo and su are not enough), or leave --service out."
    fi
}

join() {
    service="" user="" left=$#
    while [ "$left" -gt 0 ]; do
        argument=$1
        shift
        left=$((left - 1))
        case $argument in
            --source)
                [ "$left" -gt 0 ] || fail "--source needs a folder, a wheel file or a URL behind it."
                source=$1
                shift
                left=$((left - 1))
                ;;
            --source=*) source=${argument#*=} ;;
            --service) service=yes ;;
            --user) service=yes user=--user ;;
            *) set -- "$@" "$argument" ;;
        esac
    done
    if [ -z "$service" ]; then
        # A forgotten or mistyped address is told before anything is installed.
        case " $* " in
            */p2p/* | *" -h "* | *" --help "*) ;;
            *) fail "$NO_ADDRESS" ;;
        esac
        run_command join "$@"
    fi
    who=machine
    if [ -n "$user" ] || [ "$(id -u)" != 0 ]; then who=user user=--user; fi
    address="" yes=""
    for argument; do
        case $argument in
            --yes) yes=--yes ;;
            -*) fail "with --service, join takes an address, --yes, --user and --source only; the rest belongs into farflung.toml." ;;
            */p2p/*) address=$argument ;;
            *) fail "$NO_ADDRESS" ;;
        esac
    done
    check_systemd
    find_place "$who"
    install base
    set -- service install ${user:+"$user"} ${address:+--join "$address"} ${yes:+"$yes"}
    start "$@"
}

# Removes what join installed: the machine's where there is one and this is root, else this user's.
uninstall() {
    purge="" user=""
    for argument; do
        case $argument in
            --purge) purge=--purge ;;
            --user) user=--user ;;
            --service) ;;
            *) fail "uninstall takes --purge and --user only." ;;
        esac
    done
    unit=/etc/systemd/system/farflung.service
    if [ -z "$user" ] && [ "$(id -u)" = 0 ] && { [ -e /opt/farflung/venv ] || [ -e $unit ]; }; then
        base=/opt/farflung venv=/opt/farflung/venv
    else
        user=--user
        need_home
        unit=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/farflung.service
        base=$HOME/.local/share/farflung venv=$HOME/.local/share/farflung/venv
        if [ ! -e "$venv" ] && [ -n "$root" ]; then base=$root venv=$root/.venv; fi
    fi
    if [ -x "$venv/bin/farflung" ]; then
        "$venv/bin/farflung" service remove ${user:+"$user"} ${purge:+"$purge"} || exit $?
    elif [ -e "$unit" ]; then
        fail "$venv is damaged; stop the service and delete $unit, then run the same command again."
    elif [ ! -e "$venv" ]; then
        say "Farflung is not installed here"
        exit 0
    fi
    rm -rf "$venv" || fail "$venv cannot be removed; check its rights."
    [ "$base" = "$root" ] || rmdir "$base" 2>/dev/null || :
    say "removed $venv"
    exit 0
}

main() {
    source=""
    while [ "${1:-}" = --source ]; do
        [ $# -gt 2 ] || usage
        source=$2
        shift 2
    done
    [ $# -gt 0 ] || usage
    check_machine
    find_checkout
    case $1 in
        -h | --help) usage ;;
        test)
            shift
            [ -n "$root" ] || fail "the tests need Farflung's sources: sh systemd/bootstrap.sh test"
            source=""
            find_place command
            install test
            run_tests "$@"
            exit $?
            ;;
        join)
            shift
            join "$@"
            ;;
        uninstall)
            shift
            uninstall "$@"
            ;;
        *) run_command "$@" ;;
    esac
}

main "$@"
