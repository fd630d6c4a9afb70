"""The filter of system calls that code in a sandbox has (seccomp(2)), and what is done on machines without walls.

It runs in the sandbox's own processes (sandbox_inside.py) and imports little, since every call of a tool waits for it.
A filter stays until its process ends, and holds for all that the process starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

from megatron_rl.rewards.sandbox_kernel import ALL_NAMESPACES, LIBC, check

TYPE_CHECKING = False  # typing's own costs several milliseconds of every start
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Line = tuple[int, int, int, int]  # of a filter: operation, lines to skip if so, if not, number

# Numbers from the kernel's headers: prctl.h, filter.h, seccomp.h, audit.h.
SET_SECCOMP, SECCOMP_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, ANY_BIT, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
REFUSE, MISSING, NO_FAMILY = (0x00050000 | number for number in (errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT))
ALLOW = 0x7FFF0000
CALL_NUMBER, MACHINE_NUMBER, FIRST_ARGUMENT, ARGUMENT_BYTES = 0, 4, 16, 8  # where these stand in what a filter sees
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # place in the pairs below, number in audit.h

# System calls without which programs do: their numbers on x86-64 and on aarch64. They lead out of a sandbox where the
# kernel has a fault, or to another process's memory, or they take memory that no limit of a process counts (memfd_...,
# shm..., msg..., sem...).
REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "pidfd_getfd": (438, 438), "open_by_handle_at": (304, 265), "kexec_load": (246, 104), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "acct": (163, 89),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
# Without walls these are refused too: they change files, start programs, or reach other processes of the same user.
# None: aarch64 has no such call.
REFUSED_WITHOUT_WALLS = {
    "creat": (85, None), "openat2": (437, 437), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "link": (86, None), "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35),
    "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33), "chmod": (90, None),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463),
    "removexattrat": (466, 466), "flock": (73, 32),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "socket": (41, 198), "socketpair": (53, 199), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
}  # fmt: skip
SOCKET, CLONE, CLONE3, OPEN, OPENAT = (41, 198), (56, 220), (435, 435), (2, None), (257, 56)
KILL, TGKILL, PRLIMIT, FCNTL, IOCTL = (62, 129), (234, 131), (302, 261), (72, 25), (16, 29)
FAMILIES = (1, 2, 10)  # of sockets: unix, inet, inet6, all three of which a network namespace keeps in
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
NEW_THREAD = 0x00010000  # flag of clone
OWNERS = (
    8,
    10,
    15,
    1024,
)  # commands of fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX send signals, F_SETLEASE holds others up
TERMINALS = (0x5412, 0x541C, 0x8901, 0x8902)  # requests of ioctl: TIOCSTI and TIOCLINUX type, the others send signals

# Landlock: numbers of its three system calls on all machines, and the rights of landlock.h.
CREATE_RULES, ADD_RULE, RESTRICT = 444, 445, 446
GET_VERSION, PATH_BENEATH = 1, 1
EXECUTE, READ_FILE, READ_DIRECTORY = 1, 4, 8
FILE_RIGHTS = (13, 14, 15, 15, 16)  # number of rights over files that its versions know, from version 1 on


def filter_calls() -> None:
    """Refuses system calls that programs do without: REFUSED, new namespaces, other sockets than those of FAMILIES.

    On other machines than x86-64 and aarch64 nothing is refused. Raises OSError.
    """
    _install(
        REFUSED.values(),
        # A filter cannot read clone3's flags, which are in memory. The C library turns to clone where it is missing.
        [
            (CLONE3, [(ANSWER, 0, 0, MISSING)]),
            (CLONE, _any_bit(0, ALL_NAMESPACES)),
            (SOCKET, _other_than(0, FAMILIES, NO_FAMILY)),
        ],
    )


def filter_without_walls() -> None:
    """Refuses all that changes files, starts processes or programs, or reaches other processes and machines.

    Reading is left, see `show_only`. The process may signal itself and start threads. Raises OSError.
    """
    own = os.getpid()
    _install(
        REFUSED_WITHOUT_WALLS.values(),
        [
            (OPEN, _any_bit(1, WRITING)),
            (OPENAT, _any_bit(2, WRITING)),
            (CLONE3, [(ANSWER, 0, 0, MISSING)]),
            (CLONE, _no_bit(0, NEW_THREAD)),
            (KILL, _other_than(0, (own,), REFUSE)),
            (TGKILL, _other_than(0, (own,), REFUSE)),
            (PRLIMIT, _other_than(0, (0, own), REFUSE)),
            (FCNTL, _one_of(1, OWNERS)),
            (IOCTL, _one_of(1, TERMINALS)),
        ],
    )


def show_only(paths: Iterable[str]) -> None:
    """Lets this process read what lies below some paths, and no other file (landlock(7), Linux 5.13 and later).

    Files that are open stay open. Processes that are not so restricted are out of its reach. Raises OSError where the
    kernel has no Landlock.
    """
    version = LIBC.syscall(CREATE_RULES, None, ctypes.c_size_t(0), GET_VERSION)
    check(-int(version < 1), "landlock_create_ruleset")
    handled = (1 << FILE_RIGHTS[min(version, len(FILE_RIGHTS)) - 1]) - 1
    rules = struct.pack("=QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = LIBC.syscall(CREATE_RULES, rules, ctypes.c_size_t(size), 0)
    check(-int(ruleset < 0), "landlock_create_ruleset")
    try:
        for path in paths:
            _add_rule(ruleset, path)
        check(LIBC.syscall(RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, path: str) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there, or not for this user, cannot be read without a rule either
    try:
        rights = EXECUTE | READ_FILE | (READ_DIRECTORY if stat.S_ISDIR(os.fstat(file).st_mode) else 0)
        rule = struct.pack("=Qi", rights, file)
        check(LIBC.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(file)


def _install(
    refused: Iterable[tuple[int | None, ...]], checked: Sequence[tuple[tuple[int | None, ...], list[Line]]]
) -> None:
    """Installs a filter that refuses some calls, and answers others by lines which look at their arguments."""
    if os.uname().machine not in MACHINES:
        return
    place, machine = MACHINES[os.uname().machine]
    lines: list[Line] = [
        (LOAD, 0, 0, MACHINE_NUMBER),
        (EQUAL, 1, 0, machine),  # 32-bit calls have other numbers
        (ANSWER, 0, 0, REFUSE),
        (LOAD, 0, 0, CALL_NUMBER),
    ]
    if place == 0:
        lines += [(AT_LEAST, 0, 1, 0x40000000), (ANSWER, 0, 0, REFUSE)]  # so have those of the x32 interface
    for numbers in refused:
        if (number := numbers[place]) is not None:
            lines += [(EQUAL, 0, 1, number), (ANSWER, 0, 0, REFUSE)]
    for numbers, answering in checked:
        if (number := numbers[place]) is not None:
            lines += [(EQUAL, 0, len(answering) + 1, number), *answering, (LOAD, 0, 0, CALL_NUMBER)]
    lines.append((ANSWER, 0, 0, ALLOW))
    program = b"".join(struct.pack("=HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(program, len(program))
    given = struct.pack("@HP", len(lines), ctypes.addressof(buffer))
    check(LIBC.prctl(SET_SECCOMP, SECCOMP_FILTER, given, 0, 0), "prctl(PR_SET_SECCOMP)")


def _load(argument: int) -> Line:
    """Returns the line that looks at the lower half of a call's argument, all that numbers of 32 bits have."""
    return (LOAD, 0, 0, FIRST_ARGUMENT + ARGUMENT_BYTES * argument)


def _any_bit(argument: int, bits: int) -> list[Line]:
    return [_load(argument), (ANY_BIT, 0, 1, bits), (ANSWER, 0, 0, REFUSE)]


def _no_bit(argument: int, bits: int) -> list[Line]:
    return [_load(argument), (ANY_BIT, 1, 0, bits), (ANSWER, 0, 0, REFUSE)]


def _one_of(argument: int, values: Sequence[int]) -> list[Line]:
    tests = [line for value in values for line in ((EQUAL, 0, 1, value), (ANSWER, 0, 0, REFUSE))]
    return [_load(argument), *tests]


def _other_than(argument: int, values: Sequence[int], answer: int) -> list[Line]:
    tests = [(EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_load(argument), *tests, (ANSWER, 0, 0, answer)]
