"""The system calls that a sandboxed program may not make, as a seccomp program for bubblewrap.

A sandbox's namespaces and limits leave a few ways out of what they count: memory that belongs to no
process (memfd, System V), sockets that no network namespace holds (vsock), another process's
memory, limits and priority, and further namespaces with their large kernel surface.
"""

from __future__ import annotations

import errno
import platform
import struct

CLONE_NEW_ANY = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET (linux/sched.h)."""

FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6: what the sandbox's own, empty network holds."""

SYSTEM_CALLS = """
               x86_64 aarch64
ptrace            101     117
process_vm_readv  310     270
process_vm_writev 311     271
kcmp              312     272
pidfd_getfd       438     438
memfd_create      319     279
memfd_secret      447     447
shmget             29     194
msgget             68     186
semget             64     190
mq_open           240     180
io_uring_setup    425     425
userfaultfd       323     282
bpf               321     280
perf_event_open   298     241
add_key           248     217
request_key       249     218
keyctl            250     219
unshare           272      97
setns             308     268
mount             165      40
umount2           166      39
pivot_root        155      41
open_tree         428     428
move_mount        429     429
fsopen            430     430
mount_setattr     442     442
open_by_handle_at 304     265
process_madvise   440     440
move_pages        279     239
migrate_pages     256     238
setpriority       141     140
ioprio_set        251      30
sched_setparam    142     118
sched_setscheduler 144    119
sched_setaffinity 203     122
sched_setattr     314     274
clone              56     220
clone3            435     435
socket             41     198
prlimit64         302     261
"""
"""Numbers by machine: asm/unistd_64.h and asm-generic/unistd.h."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_… (linux/audit.h)."""

X32 = 0x40000000
"""From here on, x86_64 numbers are those of the x32 interface."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


def seccomp_program(machine: str | None = None) -> bytes:
    """Instructions (struct sock_filter, 8 bytes each) that refuse the calls with an errno.

    Raises `ValueError` for a machine whose numbers are not in the table.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(
            f"the sandbox has no system call filter for {machine}; it runs on "
            + " and ".join(ARCHITECTURES)
        )
    calls = _calls(machine)
    refuse = _return(_ERRNO | errno.EPERM)
    program = [
        _load(_ARCHITECTURE),
        _jump(_EQUAL, ARCHITECTURES[machine], 1, 0),
        _return(_KILL),
        _load(_NUMBER),
        _jump(_AT_LEAST, X32, 0, 1),
        refuse,
    ]
    # A C library that is told that clone3 does not exist uses clone, whose flags can be seen here.
    program += [_jump(_EQUAL, calls.pop("clone3"), 0, 1), _return(_ERRNO | errno.ENOSYS)]
    program += _when_called(
        calls.pop("clone"), [_jump(_ANY_BIT, CLONE_NEW_ANY, 0, 1), refuse, _return(_ALLOW)]
    )
    known = [_jump(_EQUAL, family, len(FAMILIES) - at, 0) for at, family in enumerate(FAMILIES)]
    program += _when_called(calls.pop("socket"), [*known, refuse, _return(_ALLOW)])
    # Process 0 is the caller itself.
    program += _when_called(
        calls.pop("prlimit64"), [_jump(_EQUAL, 0, 1, 0), refuse, _return(_ALLOW)]
    )
    for number in calls.values():
        program += [_jump(_EQUAL, number, 0, 1), refuse]
    return b"".join([*program, _return(_ALLOW)])


def _calls(machine: str) -> dict[str, int]:
    head, *rows = (line.split() for line in SYSTEM_CALLS.strip().splitlines())
    column = head.index(machine) + 1
    return {row[0]: int(row[column]) for row in rows}


def _when_called(number: int, body: list[bytes]) -> list[bytes]:
    """`body`, which ends in a return, judges the call's first argument (its low 32 bits)."""
    body = [_load(_FIRST_ARGUMENT), *body]
    return [_jump(_EQUAL, number, 0, len(body)), *body]


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", _LOAD, 0, 0, offset)


def _jump(test: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("<HBBI", test, if_true, if_false, value)


def _return(action: int) -> bytes:
    return struct.pack("<HBBI", _RETURN, 0, 0, action)
