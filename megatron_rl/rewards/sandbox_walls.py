"""Isolates the sandbox: bubblewrap's command line, the system call filter, and the message if they do not work."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

NOBODY = 65534  # id of the user and the group of a program in the sandbox
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# paths of shared libraries and programs that the sandbox can read
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix/store")
RUNNER = Path(__file__).with_name("sandbox_inside.py").read_text()
# Linux settings that can forbid user namespaces: (file, value that forbids them, command that allows them).
SYSCTLS = (
    ("proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)

# Constants of seccomp filters, from the kernel's headers filter.h, seccomp.h, audit.h and sched.h.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
REFUSE, MISSING, NO_FAMILY = (0x00050000 | number for number in (errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT))
ALLOW = 0x7FFF0000
CALL_NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16  # byte offsets in the input of a filter, struct seccomp_data
ALL_NAMESPACES = 0x7E020000  # flags of clone(2): mount, cgroup, UTS, IPC, user, PID and network namespaces
FAMILIES = (1, 2, 10)  # socket families that a network namespace isolates: unix, inet, inet6
# machine -> (index of the machine's system call numbers in the pairs of REFUSED, number of the machine in audit.h)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
SOCKET, CLONE, CLONE3 = (41, 198), (56, 220), (435, 435)
# System calls that are refused in the sandbox: name -> (number on x86-64, number on aarch64).
# Some system calls may allow an escape from the sandbox if the kernel has a bug, or access to another process's memory.
# Other system calls (memfd, shm, msg, sem, mq) allocate memory that is not covered by the limits of a process.
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


def command(scratch_bytes: int, packages: Sequence[str], fds: Mapping[str, int]) -> list[str]:
    """Returns bubblewrap's command line, which ends with the Python command that runs sandbox_inside.py.

    `scratch_bytes`: size of /tmp. `packages`: directories of modules that the code may import. `fds`: file descriptors
    by name. Bubblewrap writes the id of the sandbox's first process to `info`, waits for a byte from `mapped` (see
    `map_users`), and reads the output of `call_filter` from `seccomp`. sandbox_inside.py uses `ready` and `request`.
    Raises FileNotFoundError if bubblewrap is not installed.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("the program bwrap is not installed")
    argv = [program, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    argv += ["--unshare-cgroup-try", "--new-session", "--die-with-parent", "--cap-drop", "ALL"]
    if _may_map_two():  # the sandbox starts as root, and sandbox_inside.py then changes to the user nobody
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    argv += ["--info-fd", str(fds["info"]), "--userns-block-fd", str(fds["mapped"])]
    argv += ["--perms", "1777", "--size", str(scratch_bytes), "--tmpfs", "/tmp"]
    shown = shown_paths(packages)
    for parent in sorted({str(parent) for path in (*DEVICES, *dict(shown)) for parent in Path(path).parents}):
        # created explicitly, because only root may enter directories that bubblewrap creates implicitly
        argv += ["--dir", parent]
    for path, link in shown:
        argv += ["--symlink", link, path] if link else ["--ro-bind", path, path]
    for path in DEVICES:
        argv += ["--dev-bind", path, path]
    if os.uname().machine in MACHINES:
        argv += ["--seccomp", str(fds["seccomp"])]
    argv += ["--symlink", "/tmp", "/dev/shm", "--remount-ro", "/", "--chdir", "/tmp", "--"]
    argv += [os.path.realpath(sys.executable), "-P", "-s", "-S", "-c", RUNNER, str(fds["ready"]), str(fds["request"])]
    return argv


def map_users(process: int) -> None:
    """Writes the user and group id maps of a sandbox's user namespace. `process`: id of the sandbox's first process.

    If this process is root, the users root and nobody are mapped to themselves; otherwise nobody is mapped to the
    current user. If this process is root, both users are needed: root, because Python may be in a directory that only
    root can read, and nobody, because the program must not run as the owner of the machine's files.
    """
    place = Path(f"/proc/{process}")
    if not _may_map_two():
        (place / "setgroups").write_text("deny")
    for kind, current_id in (("uid", os.geteuid()), ("gid", os.getegid())):
        lines = f"0 0 1\n{NOBODY} {NOBODY} 1\n" if _may_map_two() else f"{NOBODY} {current_id} 1\n"
        (place / f"{kind}_map").write_text(lines)


def _may_map_two() -> bool:
    """Returns whether this process is root and the user nobody exists in its user namespace."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return os.geteuid() == 0 and any(int(first) <= NOBODY < int(first) + int(count) for first, _, count in ranges)


def shown_paths(packages: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the paths that a program may read, as (path, link): Python, shared libraries and `packages`.

    `link` is the target if the path is a symbolic link, otherwise "". A path below another returned path is left out.
    """
    links = {}
    for path in (*SYSTEM, sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"), *packages):
        real = os.path.realpath(path)
        if os.path.exists(real):
            links[real] = ""
            if (plain := os.path.abspath(path)) != real:
                links[plain] = real
    shown: dict[str, str] = {}
    for path in sorted(links):
        if not any(str(parent) in shown for parent in Path(path).parents):
            shown[path] = links[path]
    return list(shown.items())


def refusal(why: str, root: Path = Path("/")) -> str:
    """Returns the error message for a machine that cannot build a sandbox, with commands to change its settings.

    `why`: error message of bubblewrap. `root`: directory to which the file paths in SYSCTLS are relative.
    """
    cures = [
        f"`{cure}` (as root, on every node)"
        for file, forbids, cure in SYSCTLS
        if (path := root / file).exists() and path.read_text().strip() == forbids
    ] or ["in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined"]
    return (
        f"this machine can build no sandbox, and code of models is not run without one (bubblewrap: {why}). Install "
        f"bubblewrap (package `bubblewrap` of Debian, Ubuntu, RHEL), or {', or '.join(cures)} (docs/how_to/tools.md)"
    )


def call_filter() -> bytes:
    """Returns a seccomp program that refuses the system calls in REFUSED, new namespaces, and socket families that are
    not in FAMILIES.

    On machines other than x86-64 and aarch64, returns b"" and no system call is refused.
    """
    if os.uname().machine not in MACHINES:
        return b""
    index, machine = MACHINES[os.uname().machine]
    lines = [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, machine),  # the machine must match, because system calls of 32-bit programs have other numbers
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, CALL_NUMBER),
    ]
    if index == 0:
        # refuses system calls of the x32 ABI, whose numbers differ from those of x86-64
        lines += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE)]
    for numbers in REFUSED.values():
        lines += [(EQUAL, 0, 1, numbers[index]), (RETURN, 0, 0, REFUSE)]
    # clone3 is reported as missing, because a filter cannot read its flags. The C library then uses clone instead.
    lines += [(EQUAL, 0, 1, CLONE3[index]), (RETURN, 0, 0, MISSING)]
    lines += [(EQUAL, 0, 4, CLONE[index]), (LOAD, 0, 0, FIRST_ARGUMENT)]
    lines += [(ANY_BIT, 0, 1, ALL_NAMESPACES), (RETURN, 0, 0, REFUSE), (LOAD, 0, 0, CALL_NUMBER)]
    lines += [(EQUAL, 0, len(FAMILIES) + 2, SOCKET[index]), (LOAD, 0, 0, FIRST_ARGUMENT)]
    lines += [(EQUAL, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)]
    lines += [(RETURN, 0, 0, NO_FAMILY), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
