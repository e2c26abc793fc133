"""A system call filter for the tasks child: no new process, no program, no network, no signal to others.

1. Refused calls answer EPERM, so that library code that tries one carries on; ``clone3`` answers ENOSYS, because a
   filter cannot see its flags and the C library then falls back to ``clone``, which is allowed for threads only.
2. A call of another architecture than the process's ends the process (a filter on numbers says nothing there).
3. Refused as well is what would keep memory beyond a process's limits (System V and POSIX queues, shared memory), and
   to let the kernel send signals for it (``fcntl``).
4. Refused are leases, notes of changes and locks of all kinds, on whatever file: those that are bound into the sandbox
   are the host's own, and whoever opens a leased one there waits for up to 45 seconds. A lock holds up whoever asks for
   it. So what is bound need not be a copy; databases that lock their file (SQLite's) work in memory only.
5. The filter holds for every thread of the process and for ever. It is defence in depth behind the sandbox: a process
   limit does not bind the real root user, this does.

Linux on x86-64 and aarch64 only. Sources: linux/seccomp.h, linux/filter.h, linux/audit.h, and the two architectures'
system call tables.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from typing import Final

_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_SET_MODE_FILTER: Final = 1
_SECCOMP_FILTER_FLAG_TSYNC: Final = 1
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_KILL_PROCESS: Final = 0x80000000
# BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_JMP|BPF_JGE|BPF_K, BPF_JMP|BPF_JSET|BPF_K, BPF_RET|BPF_K
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16  # struct seccomp_data, little-endian
_SECOND_ARGUMENT_OFFSET: Final = 24
_CLONE_THREAD: Final = 0x00010000
# Operations of fcntl(2), the same on both architectures.
_FCNTL_REFUSED: Final = {
    # They have the kernel send any signal to another process.
    "F_SETOWN": 8,
    "F_SETSIG": 10,
    "F_SETOWN_EX": 15,
    # They hold up whoever opens or locks the file.
    "F_SETLK": 6,
    "F_SETLKW": 7,
    "F_OFD_SETLK": 37,
    "F_OFD_SETLKW": 38,
    "F_SETLEASE": 1024,
    "F_NOTIFY": 1026,
    "F_SETDELEG": 1040,
}
_X32: Final = 0x40000000

# name: (x86-64, aarch64); None where an architecture has no such call.
_REFUSED: Final[dict[str, tuple[int, int | None]]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    # Memory that outlives its process's limits, in the sandbox's own namespace.
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "flock": (73, 32),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
}
MACHINES: Final = {
    # machine: (column, AUDIT_ARCH, clone, clone3, seccomp, fcntl)
    "x86_64": (0, 0xC000003E, 56, 435, 317, 72),
    "aarch64": (1, 0xC00000B7, 220, 435, 277, 25),
}


def _statement(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def program(machine: str) -> bytes:
    """The filter for ``machine`` ("x86_64" or "aarch64"), as an array of ``struct sock_filter``."""
    column, architecture, clone, clone3, _, fcntl = MACHINES[machine]
    code = [
        _statement(_LOAD, _ARCHITECTURE_OFFSET),
        _statement(_EQUAL, architecture, if_true=1),
        _statement(_RETURN, _KILL_PROCESS),
        _statement(_LOAD, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        code += [_statement(_AT_LEAST, _X32, if_false=1), _statement(_RETURN, _KILL_PROCESS)]
    code += [_statement(_EQUAL, clone3, if_false=1), _statement(_RETURN, _ERRNO | errno.ENOSYS)]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            code += [_statement(_EQUAL, number, if_false=1), _statement(_RETURN, _ERRNO | errno.EPERM)]
    code += [
        _statement(_EQUAL, fcntl, if_false=len(_FCNTL_REFUSED) + 3),
        _statement(_LOAD, _SECOND_ARGUMENT_OFFSET),
        *(
            _statement(_EQUAL, operation, if_true=len(_FCNTL_REFUSED) - place)
            for place, operation in enumerate(_FCNTL_REFUSED.values())
        ),
        _statement(_RETURN, _ALLOW),
        _statement(_RETURN, _ERRNO | errno.EPERM),
        _statement(_EQUAL, clone, if_true=1),
        _statement(_RETURN, _ALLOW),
        _statement(_LOAD, _FIRST_ARGUMENT_OFFSET),
        _statement(_ANY_BIT, _CLONE_THREAD, if_true=1),
        _statement(_RETURN, _ERRNO | errno.EPERM),
        _statement(_RETURN, _ALLOW),
    ]
    return b"".join(code)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def call_number(machine: str) -> int:
    """The number of the system call seccomp(2) on ``machine``."""
    return MACHINES[machine][4]


def install() -> str | None:
    """Put the filter on this whole process. Returns None, or why that was not possible."""
    machine = platform.machine()
    if machine not in MACHINES:
        return f"no system call filter for {machine}"
    code = program(machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    filters = _Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return f"PR_SET_NO_NEW_PRIVS: {errno.errorcode[ctypes.get_errno()]}"
    number = call_number(machine)
    outcome = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER),
        ctypes.c_ulong(_SECCOMP_FILTER_FLAG_TSYNC),
        ctypes.byref(filters),
    )
    if outcome != 0:
        return f"seccomp: {errno.errorcode.get(ctypes.get_errno(), outcome)}"
    return None
