"""Runs a command as a default container does: without namespaces and mounts.

    python tests/nanorl/sandbox/namespace_ban.py [--user UID] COMMAND ...

The filter of system calls refuses what the default profile of container engines refuses to a
process without rights: `unshare`, `setns`, `clone` with a namespace's flag, `clone3` (whose flags
no filter can see), and both generations of the mount calls. `--user` gives root up first.
Source: the default profile of moby.
"""

from __future__ import annotations

import argparse
import base64
import os
import platform
import sys
from errno import ENOSYS, EPERM
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from nanorl.sandbox.backends import rights
from nanorl.sandbox.seccomp import ALLOW, Instruction

_LOAD, _EQUALS, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ERRNO = 0x00050000
_NAMESPACES = 0x7E020000
# clone, clone3, then unshare, setns, mount, umount2, pivot_root; the new calls have one number.
_NUMBERS = {
    "x86_64": (56, 435, 272, 308, 165, 166, 155),
    "aarch64": (220, 435, 97, 268, 40, 39, 41),
}
_NEW_MOUNT_CALLS = (428, 429, 430, 431, 432, 433, 442)


def banning(machine: str) -> list[Instruction]:
    """The filter; everything else is allowed."""
    clone, clone3, *refused = _NUMBERS[machine]
    program = [Instruction(_LOAD, 0)]
    for number in (*refused, *_NEW_MOUNT_CALLS):
        program += [Instruction(_EQUALS, number, 0, 1), Instruction(_RETURN, _ERRNO | EPERM)]
    program += [Instruction(_EQUALS, clone3, 0, 1), Instruction(_RETURN, _ERRNO | ENOSYS)]
    program += [Instruction(_EQUALS, clone, 0, 3), Instruction(_LOAD, 16)]
    program += [Instruction(_ANY_BIT, _NAMESPACES, 0, 1), Instruction(_RETURN, _ERRNO | EPERM)]
    return [*program, Instruction(_RETURN, ALLOW)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--user", type=int, default=-1, help="become this user first")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    code = b"".join(one.pack() for one in banning(platform.machine()))
    wanted = {"rlimits": {}, "user": given.user, "landlock": None}
    rights.lower({**wanted, "filter": base64.b64encode(code).decode()})
    os.execvp(given.command[0], given.command)


if __name__ == "__main__":
    main()
