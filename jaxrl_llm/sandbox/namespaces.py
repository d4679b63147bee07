"""Namespaces of the Linux kernel: a tree that is read-only, no network, and no other process.

Python 3.11 has no calls for these, so they go through libc.
"""

import ctypes
import os
import site
import struct
import sys
from contextlib import suppress
from pathlib import Path

from jaxrl_llm.sandbox.processes import PR_SET_DUMPABLE, libc

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
APART = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWNET

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}  # numbers of system calls
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID = 1, 2

NOBODY = 65534
FOLDER = "/sandbox"  # where programs run, and all that they can write to
DEVICES = ("null", "zero", "random", "urandom")
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")


def isolate(read_only: list[str]) -> None:
    """Leave all namespaces; the namespace of processes is left by the next child.

    Afterwards the tree has the system's programs, `read_only` and nothing else, and this process
    is "nobody", with rights over its own namespaces only. Raises OSError where that is forbidden.
    """
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        if os.geteuid() == 0 and _unshare(APART, may_fail=True):
            _build_tree(read_only)
            _become_nobody()
            _unshare(NEWUSER | NEWPID | NEWNS)
            _map_user(proc)
        else:
            if os.geteuid() == 0:  # root of a container that may not leave its namespaces as root
                _become_nobody()
            user = (os.geteuid(), os.getegid())
            _unshare(NEWUSER | NEWPID | APART)
            _map_user(proc, *user)
            _build_tree(read_only)
    finally:
        os.close(proc)


def fresh_folder(num_bytes: int) -> None:
    """FOLDER, empty, for at most `num_bytes`. What the one before held is gone."""
    with suppress(OSError):
        _check(libc.umount2(FOLDER.encode(), MNT_DETACH), f"umount {FOLDER}")
    options = f"size={num_bytes},nr_inodes=4096,mode=1777"
    _mount("tmpfs", FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, options)


def python_folders() -> list[str]:
    """Folders that a Python program must read: the interpreter and its packages."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()}
    paths = sorted(os.path.realpath(folder) for folder in folders)
    return [path for path in paths if path != "/" and not f"{path}/".startswith("/usr/")]


# ------------------------------------------------------------------------- user


def _unshare(flags: int, *, may_fail: bool = False) -> bool:
    failed = libc.unshare(flags)
    if not may_fail:
        _check(failed, "unshare")
    return not failed


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # or its own files in /proc belong to root


def _map_user(proc: int, user: int = NOBODY, group: int = NOBODY) -> None:
    """This user is the only one of the new namespace, and "nobody" in it."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)


# ------------------------------------------------------------------------- tree


def _build_tree(read_only: list[str]) -> None:
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    # The tmpfs hides /tmp only until it is the root itself.
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/.old")
    pivot = PIVOT_ROOT[os.uname().machine]
    _check(libc.syscall(pivot, b"/tmp", b"/tmp/.old"), "pivot_root")
    os.chdir("/")
    for path in (*SYSTEM, *read_only, *(f"/dev/{name}" for name in DEVICES)):
        _show(path)
    os.mkdir(FOLDER)
    if not os.path.exists("/tmp"):  # the interpreter may lie there
        os.symlink(FOLDER, "/tmp")
    _check(libc.umount2(b"/.old", MNT_DETACH), "umount the old tree")
    os.rmdir("/.old")
    _make_read_only()


def _show(path: str) -> None:
    """Bind a file or folder of the old tree at the same place; a link stays a link."""
    old = Path("/.old") / path.lstrip("/")
    new = Path(path)
    if not (old.exists() or old.is_symlink()) or any(p.is_symlink() for p in (new, *new.parents)):
        return
    new.parent.mkdir(parents=True, exist_ok=True)
    if old.is_symlink():
        new.symlink_to(os.readlink(old))
        return
    if old.is_dir():
        new.mkdir(exist_ok=True)
    else:
        new.touch()
    _mount(str(old), str(new), None, MS_BIND | MS_REC)


def _make_read_only() -> None:
    attributes = struct.pack("=QQQQ", ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    failed = libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, size)
    _check(failed, "mount_setattr (Linux 5.12)")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_bytes = kind.encode() if kind else None
    failed = libc.mount(
        source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), options.encode()
    )
    _check(failed, f"mount {target}")


def _check(failed: int, what: str) -> None:
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
