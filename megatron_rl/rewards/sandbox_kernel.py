"""Calls of the Linux kernel that a sandbox is made of: namespaces, mounts and rights.

It runs in the sandbox's own processes (sandbox_inside.py) and imports little, since every call of a tool waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

TYPE_CHECKING = False  # typing's own costs several milliseconds of every start
if TYPE_CHECKING:
    from collections.abc import Sequence

NOBODY = 65534  # the user and the group that code in a sandbox has
LIBC = ctypes.CDLL(None, use_errno=True)

# Numbers from the kernel's headers: sched.h, mount.h, prctl.h, capability.h.
NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
NAMESPACES = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PID | NEW_NET
ALL_NAMESPACES = NAMESPACES | NEW_USER | 0x02000000  # with that of control groups
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MOUNT_FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
DETACH = 2
SET_DUMPABLE, SET_CHILD_SUBREAPER, SET_NO_NEW_RIGHTS = 4, 36, 38
CAPABILITIES_VERSION = 0x20080522

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
OLD = "/.old"  # where the machine's own root stands while the new one is built


def enter_namespaces() -> bool:
    """Puts this process into new namespaces of mounts, network, IPC and host name, and its children into one of
    processes.

    Returns whether they belong to a new user namespace. Without one, which only root can do, the number of processes
    is counted together with those of other sandboxes. Raises OSError where the kernel forbids it.
    """
    ready, tell = os.pipe()
    own = os.getpid()
    mapper = os.fork()  # whoever is in the new user namespace may map no more than one user
    if mapper == 0:
        _map_when_told(own, ready, tell)
    os.close(ready)
    entered = LIBC.unshare(NEW_USER | NAMESPACES) == 0
    number = ctypes.get_errno()
    if entered:
        os.write(tell, b"1")
    os.close(tell)
    mapped = os.waitpid(mapper, 0)[1] == 0
    if entered and not mapped:
        raise OSError(errno.EPERM, "the users of a new user namespace cannot be mapped")
    if not entered and LIBC.unshare(NAMESPACES) != 0:
        raise OSError(number, f"unshare: {os.strerror(number)}")
    return entered


def leave_network() -> None:
    """Puts this process into a network of its own, without devices, where the kernel allows it."""
    LIBC.unshare(NEW_NET if os.geteuid() == 0 else NEW_USER | NEW_NET)


def build_root(shown: Sequence[tuple[str, str]], scratch_bytes: int) -> None:
    """Makes the root directory anew: the paths `shown`, read-only, a few devices, and an empty /tmp in memory.

    A path comes with what it is a symbolic link to, or with an empty text. Nothing else of the machine's files can be
    seen afterwards, and there is no /proc. Raises OSError.
    """
    os.umask(0o022)
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", NO_SETUID | NO_DEVICES, "size=1m,mode=755")
    os.mkdir("/tmp" + OLD)
    check(LIBC.pivot_root(b"/tmp", b"/tmp" + OLD.encode()), "pivot_root")
    os.chdir("/")
    os.mkdir("/tmp")
    _mount("tmpfs", "/tmp", "tmpfs", NO_SETUID | NO_DEVICES, f"size={scratch_bytes},nr_inodes=4096,mode=1777")
    for path, link in (*shown, *((path, "") for path in DEVICES)):
        _show(path, link)
    os.symlink("/tmp", "/dev/shm")
    _make_mounts_read_only()
    check(LIBC.umount2(OLD.encode(), DETACH), "umount of the machine's own root")
    os.rmdir(OLD)
    _mount(None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES)
    os.chdir("/tmp")


def become_nobody() -> None:
    """Makes this process the user nobody. Raises OSError."""
    if os.getresgid() != (NOBODY,) * 3:
        os.setresgid(NOBODY, NOBODY, NOBODY)
    try:  # noqa: SIM105 - contextlib takes milliseconds of every start
        os.setgroups([])
    except PermissionError:
        pass  # a namespace of an ordinary user keeps the groups of that user
    if os.getresuid() != (NOBODY,) * 3:
        os.setresuid(NOBODY, NOBODY, NOBODY)


def drop_rights() -> None:
    """Gives up all capabilities; no program gives any back. Raises OSError."""
    header, none = struct.pack("=Ii", CAPABILITIES_VERSION, 0), bytes(24)
    check(LIBC.capset(header, none), "capset")
    check(LIBC.prctl(SET_NO_NEW_RIGHTS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def adopt_orphans() -> None:
    """Makes this process the parent of every process below it whose own parent ends, where the kernel can do that."""
    LIBC.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_attachable(attachable: bool) -> None:
    """Says whether other processes of the same user may look into this one's memory (ptrace, pidfd_getfd)."""
    check(LIBC.prctl(SET_DUMPABLE, int(attachable), 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def check(result: int, what: str) -> None:
    """Raises OSError with the last error of the C library unless `result` is 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _map_when_told(process: int, ready: int, tell: int) -> None:
    """Waits for a byte, then maps the users of the process's user namespace, and ends this process."""
    status = 1
    try:
        os.close(tell)
        if os.read(ready, 1):
            _map_users(process)
            status = 0
    finally:
        os._exit(status)


def _map_users(process: int) -> None:
    """Maps root and nobody to themselves where this process may; else nobody to the user who runs this."""
    own = {"uid": os.geteuid(), "gid": os.getegid()}
    try:
        for kind, number in own.items():
            _write(f"/proc/{process}/{kind}_map", f"0 {number} 1\n{NOBODY} {NOBODY} 1\n")
    except OSError:
        _write(f"/proc/{process}/setgroups", "deny")
        for kind, number in own.items():
            _write(f"/proc/{process}/{kind}_map", f"{NOBODY} {number} 1\n")


def _write(path: str, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def _show(path: str, link: str) -> None:
    """Puts the old root's `path` into the new one, with all that is mounted below it, or makes a link."""
    if os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if link:
        os.symlink(link, path)
        return
    if os.path.isdir(OLD + path):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(OLD + path, path, None, BIND | RECURSIVE)


def _make_mounts_read_only() -> None:
    """Makes every mount of the new root read-only, those below others too, but for the root itself and /tmp."""
    with open(OLD + "/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = [line.split() for line in file]
    for fields in mounts:
        point = fields[4]
        for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            point = point.replace(code, character)
        if point in ("/", "/tmp", OLD) or point.startswith(OLD + "/"):
            continue
        kept = 0
        for word in fields[5].split(","):  # an ordinary user's namespace must keep these
            kept |= MOUNT_FLAGS.get(word, 0)
        _mount(None, point, None, REMOUNT | BIND | READ_ONLY | NO_SETUID | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    given = None if options is None else options.encode()
    check(LIBC.mount(*texts, ctypes.c_ulong(flags), given), f"mount {kind or ''} at {target}")
