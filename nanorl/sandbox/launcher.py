"""Joins the cgroups, gives up root, becomes bubblewrap:

    launcher.py UID CGROUP_PROCS [FOLDER=PLACE ...] -- ARGV

A process of its own because the host has threads: code between its fork and exec could deadlock.
The cgroup must be joined while still root, and the uid dropped before bubblewrap starts: started
by root it would leave /proc/sys writable and RLIMIT_NPROC without effect.
UID is -1 to keep the caller's; CGROUP_PROCS is a list joined by ":", or "-". A FOLDER that the uid
cannot reach, as one in /root, is shown to it at PLACE, in a mount namespace of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


def main(arguments: list[str]) -> None:
    assert "--" in arguments, f"usage: UID CGROUP_PROCS [FOLDER=PLACE ...] -- ARGV, not {arguments}"
    split = arguments.index("--")
    (uid, procs, *shown), argv = arguments[:split], arguments[split + 1 :]
    for path in procs.split(":") if procs != "-" else []:
        with open(path, "w") as file:
            file.write("0")
    if shown:
        _show(shown)
    if int(uid) >= 0:
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))
    os.chdir("/")
    os.execv(argv[0], argv)


def _show(shown: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    mounts = [one.encode().split(b"=", 1) for one in shown]
    results = [libc.unshare(_CLONE_NEWNS)]
    results += [libc.mount(b"", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)]
    flags = ctypes.c_ulong(_MS_BIND | _MS_REC)
    results += [libc.mount(folder, place, None, flags, None) for folder, place in mounts]
    if any(results):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot show {shown} to the sandbox: {os.strerror(number)}")


if __name__ == "__main__":
    main(sys.argv[1:])
