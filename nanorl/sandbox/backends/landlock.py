"""`landlock`: `rlimits` with the kernel's file rules and the system-call filter besides. Works
where namespaces do not, inside a plain container. Only with `--allow-unsafe-sandbox`.

Programs can open nothing but /usr, the interpreter and their own folder, have no sockets but unix
ones, and the filter of seccomp.py. What is left open: they see the machine's processes only as far
as signals go (Landlock ABI 6 stops these), what they start may outlive them under a plain user, and
the memory of several processes is not summed without a cgroup.
"""

from __future__ import annotations

import base64
import errno
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanorl.sandbox import seccomp
from nanorl.sandbox.backends.rights import landlock_version
from nanorl.sandbox.backends.rlimits import RlimitsBackend
from nanorl.sandbox.base import SandboxSpec, SandboxUnavailable

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# It cannot look at /proc, which would show it every other process of the machine.
_QUESTION = r"""
import ctypes, errno, json, os, resource, socket
def error_of(function, *args):
    try:
        function(*args)
    except OSError as error:
        return error.errno
    return 0
libc = ctypes.CDLL(None, use_errno=True)
def unshare():
    if libc.unshare(0x10000000) != 0:
        raise OSError(ctypes.get_errno(), "")
print(json.dumps({
    "host's file": error_of(open, "@SECRET@"),
    "processes": error_of(os.listdir, "/proc"),
    "passwords": error_of(open, "/etc/passwd"),
    "write to /": error_of(open, "/x", "w"),
    "write to /usr": error_of(open, "/usr/x", "w"),
    "write to /tmp": error_of(open, "/tmp/x", "w"),
    "internet socket": error_of(socket.socket, socket.AF_INET),
    "user namespace": error_of(unshare),
    "new privileges": libc.prctl(39, 0, 0, 0, 0),
    "filter": libc.prctl(21, 0, 0, 0, 0),
    "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "core dumps": resource.getrlimit(resource.RLIMIT_CORE)[0],
    "variables": sorted(os.environ),
}))
"""


class LandlockBackend(RlimitsBackend):
    """Starts guests that fence their programs in."""

    tier = "landlock"
    question = _QUESTION

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        version = landlock_version()
        if version == 0:
            raise SandboxUnavailable(
                "--sandbox landlock: this kernel has no Landlock, or not among its security "
                "modules (`cat /sys/kernel/security/lsm`)",
                "use --sandbox bwrap, or a kernel from 5.13 on with lsm=landlock,... on its "
                "command line",
            )
        self.details["landlock ABI"] = str(version)

    @property
    def promises(self) -> Mapping[str, Any]:
        refused = (errno.EACCES, errno.EROFS)
        kept = dict(super().promises)
        kept.pop("held capabilities", None)  # one that sees no /proc cannot say
        return {
            **kept,
            "host's file": errno.EACCES,
            "processes": errno.EACCES,
            "passwords": errno.EACCES,
            "write to /": refused,
            "write to /usr": refused,
            "write to /tmp": refused,
            "internet socket": errno.EAFNOSUPPORT,
            "user namespace": errno.EPERM,
            "filter": 2,
        }

    def _fences(self, folder: Path) -> dict[str, Any]:
        files = [str(file) for file in self.python.files]
        return {
            "filter": base64.b64encode(seccomp.filter_bytes(platform.machine())).decode(),
            "landlock": {
                "read": [*_SYSTEM, *files, str(self.python.path), "/dev/null"],
                "write": [str(folder), *_DEVICES],
            },
        }
