"""A filter of system calls: what a program of a model does not need, and the kernel's weak spots.

The namespaces contain a program. The filter makes it harder to attack the kernel from inside. It
also closes what namespaces leave open: sockets to a hypervisor, memory without a size.
"""

import ctypes
import errno
import os
import struct

from jaxrl_llm.sandbox.processes import libc

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER_MODE = 38, 22, 2
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # numbers from here on are x86_64's second interface
CLONE_NEW = 0x7E020080  # the flags of all new namespaces
AF_UNIX = 1

# Numbers for x86_64 and aarch64. None: that machine does not have the call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "quotactl": (179, 60),
    "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "syslog": (103, 116), "personality": (135, 92),
    "modify_ldt": (154, None), "ioperm": (173, None), "iopl": (172, None),
    "fanotify_init": (300, 262), "vmsplice": (278, 75), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "process_madvise": (440, 440),
}  # fmt: skip
# Calls for a process that the first argument names: a program may name itself, as 0.
FOR_ITSELF = {
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
}  # fmt: skip
SOCKET, CLONE, CLONE3 = (41, 198), (56, 220), (435, 435)

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST = 0, 4, 16  # offsets in the data that a filter sees; first argument


def refuse_calls() -> None:
    """Set the filter for this process and all its children. Raises OSError."""
    program = filter_program(os.uname().machine)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, FILTER_MODE, header)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "this kernel has no filter of system calls")


def filter_program(machine: str) -> bytes:
    """The filter in the kernel's form (classic BPF). Raises OSError for another machine."""
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    column = 0 if machine == "x86_64" else 1
    refused = REFUSE | errno.EPERM
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, X32),
        (_RETURN, 0, 0, refused),
        # glibc falls back to clone, whose flags can be seen.
        *_if_equal(CLONE3[column], [(_RETURN, 0, 0, REFUSE | errno.ENOSYS)]),
        *_if_equal(
            CLONE[column],
            [(_LOAD, 0, 0, _FIRST), (_ANY_BIT, 0, 1, CLONE_NEW), (_RETURN, 0, 0, refused)]
            + [(_RETURN, 0, 0, ALLOW)],
        ),
        *_if_equal(
            SOCKET[column],
            [(_LOAD, 0, 0, _FIRST), (_EQUAL, 1, 0, AF_UNIX), (_RETURN, 0, 0, refused)]
            + [(_RETURN, 0, 0, ALLOW)],
        ),
    ]
    for numbers in FOR_ITSELF.values():
        itself = [(_LOAD, 0, 0, _FIRST), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, refused)]
        code += _if_equal(numbers[column], [*itself, (_RETURN, 0, 0, ALLOW)])
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            code += _if_equal(number, [(_RETURN, 0, 0, refused)])
    code.append((_RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in code)


Line = tuple[int, int, int, int]


def _if_equal(number: int, then: list[Line]) -> list[Line]:
    """Lines for one number of a call; others jump over them."""
    return [(_EQUAL, 0, len(then), number), *then]
