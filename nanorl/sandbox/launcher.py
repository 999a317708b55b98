"""Joins the cgroups, gives up root, becomes bubblewrap: `launcher.py UID CGROUP_PROCS -- ARGV`.

A process of its own because the host has threads: code between its fork and exec could deadlock.
The cgroup must be joined while still root, and the uid dropped before bubblewrap starts: started
by root it would leave /proc/sys writable and RLIMIT_NPROC without effect.
UID is -1 to keep the caller's; CGROUP_PROCS is a list joined by ":", or "-".
"""

from __future__ import annotations

import os
import sys


def main(arguments: list[str]) -> None:
    uid, procs, separator, *argv = arguments
    assert separator == "--", f"usage: UID CGROUP_PROCS -- ARGV, not {arguments}"
    for path in procs.split(":") if procs != "-" else []:
        with open(path, "w") as file:
            file.write("0")
    if int(uid) >= 0:
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))
    os.chdir("/")
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
