"""A program that tries to get out, and what the host must read back before it trusts the walls."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanorl.sandbox.base import ExecResult, ExecStatus

# It only reports; the comparison is made here, outside.
CODE = r"""
import ctypes, json, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def error_of(function, *args):
    try:
        function(*args)
    except OSError as error:
        return error.errno
    return 0
def unshare():
    if libc.unshare(0x10000000) != 0:
        raise OSError(ctypes.get_errno(), "")
def make_folder(path):
    os.mkdir(path)
    os.rmdir(path)  # where nothing forbids it, nothing is left behind
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "user": os.getuid(),
    "capabilities": [int(status.get(name, "0"), 16)
                     for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "held capabilities": int(status["CapPrm"], 16) | int(status["CapEff"], 16),
    "new privileges": libc.prctl(39, 0, 0, 0, 0),
    "filter": libc.prctl(21, 0, 0, 0, 0),
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "interfaces": [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line],
    "internet socket": error_of(socket.socket, socket.AF_INET),
    "user namespace": error_of(unshare),
    "host's folders": [name for name in ("/home", "/root", "/sys", "/var/lib", "/etc/shadow")
                       if os.path.exists(name)],
    "write to /": error_of(make_folder, "/x"),
    "write to /usr": error_of(make_folder, "/usr/x"),
    "files in /tmp": sorted(os.listdir("/tmp")),
    "host's file": os.path.exists("@SECRET@"),
    "strangers": sorted({int(name) for name in os.listdir("/proc") if name.isdigit()}
                        - {1, os.getpid(), os.getppid()}),
    "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "core dumps": resource.getrlimit(resource.RLIMIT_CORE)[0],
    "variables": sorted(os.environ),
}))
"""

WALLS: Mapping[str, Any] = {
    "user": 1000,
    "capabilities": [0, 0, 0, 0],
    "new privileges": 1,
    "filter": 2,
    "processes": [1, 2],
    "interfaces": ["lo"],
    "internet socket": errno.EAFNOSUPPORT,
    "user namespace": errno.EPERM,
    "host's folders": [],
    "write to /": errno.EROFS,
    "write to /usr": errno.EROFS,
}
"""What it must see inside bubblewrap. A tuple names several answers that are as good."""


def walls_without(*names: str) -> dict[str, Any]:
    """The walls of bubblewrap that a back end keeps which has others in place of `names`."""
    return {name: value for name, value in WALLS.items() if name not in names}


def find_leak(
    result: ExecResult,
    files_in_tmp: Sequence[str] = ("program.py",),
    promises: Mapping[str, Any] | None = None,
) -> str:
    """The first thing that the canary saw and should not have; empty if it saw only walls.

    `promises`: what it must see; without them it is what bubblewrap promises.
    """
    if result.status is not ExecStatus.OK:
        return f"the canary ended with {result.status}: {result.stderr.decode(errors='replace')}"
    seen = json.loads(result.stdout)
    if promises is None:
        promises = {**WALLS, "files in /tmp": list(files_in_tmp)}
    for name, value in promises.items():
        accepted = value if isinstance(value, tuple) else (value,)
        if seen.get(name) not in accepted:
            wanted = " or ".join(map(repr, accepted))
            return f"{name}: a program saw {seen.get(name)!r}, not {wanted}"
    return ""
