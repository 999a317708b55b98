"""What a process inside a box gives up before it becomes the program: limits, user, calls, files.

The walls around the box are its back end's. These are a second row, and for `landlock` and
`rlimits` the only one. Runs inside, in the forked child, right before the program. Stdlib only.
Source: landlock(7).
"""

from __future__ import annotations

import base64
import ctypes
import errno
import os
import resource
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from nanorl.sandbox.confine import check, prctl, syscall

_SET_DUMPABLE, _SET_NO_NEW_PRIVS, _SET_CHILD_SUBREAPER = 4, 38, 36
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
# The numbers are the same on every kind of machine (asm-generic/unistd.h).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_ABI_VERSION = 1  # the flag that asks for it
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILES_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14) | (1 << 15)
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # of each ABI; later ones add none to files
_TCP = 3  # bind and connect, from ABI 4 on
_SCOPES = 3  # abstract sockets and signals, from ABI 6 on


def keep_for_itself() -> None:
    """Keep the server to itself: no program of the same user may look into it or take its
    descriptors, and orphans come to it."""
    check(prctl(_SET_DUMPABLE, 0), "clear dumpable")
    _adopt_orphans()


def _adopt_orphans() -> None:
    """gVisor's kernel lacks the call, and says so; there orphans go to the init of the box."""
    if prctl(_SET_CHILD_SUBREAPER, 1) < 0 and (number := ctypes.get_errno()) != errno.EINVAL:
        raise OSError(number, f"become the parent of orphans: {os.strerror(number)}")


def lower(config: Mapping[str, Any], is_hidden: bool = False) -> None:
    """Gives up what `config` says, for ever. The filter comes last. `is_hidden`: no other process
    looks into it, and orphans come to it."""
    for name, value in config["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (most, most))
    if config["user"] >= 0:
        user = config["user"]
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    check(prctl(_SET_DUMPABLE, 0 if is_hidden else 1), "set dumpable")
    if is_hidden:
        _adopt_orphans()
    check(prctl(_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    if config["landlock"]:
        _fence(config["landlock"]["read"], config["landlock"]["write"])
    if config["filter"]:
        _filter(base64.b64decode(config["filter"]))


def landlock_version() -> int:
    """The kernel's Landlock ABI; 0: it has none, or it is switched off."""
    zero = ctypes.c_size_t(0)
    return max(syscall(_CREATE_RULESET, None, zero, ctypes.c_uint(_ABI_VERSION)), 0)


def _fence(read: Sequence[str], write: Sequence[str]) -> None:
    """From here on only these paths exist, the ones for reading and the ones for everything."""
    version = landlock_version()
    rights = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack(
        "<QQQ", rights, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = check(
        syscall(_CREATE_RULESET, attributes[:size], ctypes.c_size_t(size), ctypes.c_uint(0)),
        "landlock",
    )
    for paths, allowed in ((read, _READ), (write, rights)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    check(syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)), "landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: str, allowed: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        allowed &= _FILES_ONLY
    rule = struct.pack("<Qi", allowed, descriptor)
    arguments = (ctypes.c_int(ruleset), ctypes.c_int(_RULE_PATH_BENEATH), rule, ctypes.c_uint(0))
    check(syscall(_ADD_RULE, *arguments), f"landlock {path}")
    os.close(descriptor)


def _filter(code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(
        struct.pack("<H6xQ", len(code) // 8, ctypes.addressof(buffer))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    mode, address = ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.c_ulong(ctypes.addressof(program))
    zero = ctypes.c_ulong(0)
    check(libc.prctl(ctypes.c_int(_PR_SET_SECCOMP), mode, address, zero, zero), "seccomp")
