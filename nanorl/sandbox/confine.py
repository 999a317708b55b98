"""Namespaces, mounts and the giving up of rights: the system calls behind each execution.

Runs inside the worker. Stdlib only; Python has no `clone`, `mount` or `capset`, hence ctypes.
Left out: user ids (one user namespace for the worker's life) and the network, which bubblewrap has
already taken away.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from typing import Any

FILTER_PATH = "/sbx/filter.bpf"
_SYS_CLOSE_RANGE = 436
_SYS_PIDFD_OPEN = 434
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(os.uname().machine, 0)
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
_CLONE_SHARED = 0x00000100 | 0x00000200 | 0x00000400  # VM, FS, FILES
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MNT_DETACH = 2
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
# The host's own nodes, and a devpts that belongs to the program's user: their times and modes can
# be written where the mount can, and would be read by the next program.
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "pts")
_PR_SET_DUMPABLE, _PR_CAPBSET_READ, _PR_CAPBSET_DROP = 4, 23, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_SECCOMP_SET_MODE_FILTER = 1

_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: the GIL stays held over a raw clone
_libc.syscall.restype = ctypes.c_long
_pause = ctypes.cast(_libc.pause, ctypes.c_void_p)


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *args: Any) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *args))


def prctl(option: int, arg: int = 0) -> int:
    zero = ctypes.c_ulong(0)
    return int(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(arg), zero, zero, zero))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    encoded = [s.encode() or None for s in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None)
    check(result, f"mount {kind or 'private'} on {target}")


def close_from(first: int) -> None:
    """Closes every descriptor from `first` on."""
    check(syscall(_SYS_CLOSE_RANGE, *map(ctypes.c_uint, (first, 0xFFFFFFFF, 0))), "close_range")


def enter_pid_namespace(control: int) -> None:
    """Continues as pid 1 of a pid namespace that belongs to this user namespace.

    Bubblewrap's own belongs to the user namespace above, so nobody in here could return to it
    (setns(2)) after having made one for an execution. The process that bubblewrap started stays
    behind, without the host's socket `control`, until the server ends.
    """
    check(_libc.unshare(_CLONE_NEWPID), "unshare the pid namespace")
    if (pid := os.fork()) != 0:
        os.close(control)
        os.waitpid(pid, 0)
        os._exit(0)


class Confinement:
    """Everything that is worked out once, so that a child only makes system calls."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.is_isolated = "namespaces" not in config["ablate"]
        self.folder = ""  # of a session: kept from one execution to the next, as its /tmp is
        self._own_pids = -1
        bounding = [cap for cap in range(64) if prctl(_PR_CAPBSET_READ, cap) == 1]
        self.bounding = bounding
        self.capability_header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
        self.no_capabilities = bytes(24)
        code = b""
        if "seccomp" not in config["ablate"]:
            with open(FILTER_PATH, "rb") as file:
                code = file.read()
        self.filter_code = ctypes.create_string_buffer(code, max(len(code), 1))
        self.filter_program = struct.pack(
            "<H6xQ", len(code) // 8, ctypes.addressof(self.filter_code)
        )

    def enter_mount_namespace(self) -> None:
        """Enter, once and in the server, a mount namespace of its own, with the devices read-only,
        and hide the server's memory, in which pid 1 of every execution lives.

        All executions inherit these mounts; a read-only mount does not stop writes to a device.
        """
        check(_libc.unshare(_CLONE_NEWNS), "unshare the mount namespace")
        _mount("", "/", "", _MS_REC | _MS_PRIVATE)
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        flags = _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NOEXEC
        for name in _DEVICES:
            _mount("", f"/dev/{name}", "", flags)
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        check(prctl(_PR_SET_DUMPABLE, 0), "clear dumpable")

    def new_pid_namespace(self) -> PidNamespace | None:
        """For the processes that the server forks from now on; None where a test left it out."""
        return PidNamespace(self._own_pids) if self.is_isolated else None

    def mount_folder(self, path: str) -> None:
        """A fresh, empty folder of limited size; what another one held is out of sight."""
        size, inodes = self.config["tmp_bytes"], self.config["tmp_inodes"]
        options = f"size={size},nr_inodes={inodes},mode=1777"
        _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, options)

    def make_read_only(self, path: str) -> None:
        """Of a mounted folder; for every execution that starts from now on."""
        flags = _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV
        _mount("", path, "", flags)

    def unmount(self, path: str) -> None:
        """Lets go of a mounted folder; its memory is free once no process looks at it."""
        check(_libc.umount2(path.encode(), _MNT_DETACH), f"unmount {path}")

    def isolate(self) -> None:
        """Fresh namespaces and mounts, for the process that is to become the program."""
        check(prctl(_PR_SET_DUMPABLE, 1), "set dumpable")  # or its own /proc/self is not its own
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(descriptor, b"1000")
        os.close(descriptor)
        os.setsid()  # or `kill(0, ...)` would reach the server's process group
        if self.is_isolated:
            check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWIPC), "unshare mounts and ipc")
            safe = _MS_NOSUID | _MS_NODEV
            if not self.folder:
                self.mount_folder("/tmp")
            _mount("tmpfs", "/dev/shm", "tmpfs", safe, "size=16m,nr_inodes=1024,mode=1777")
            # Read-only: oom_score_adj stays. The kernel's command line is the host's affair.
            _mount("proc", "/proc", "proc", safe | _MS_NOEXEC | _MS_RDONLY)
            _mount("/dev/null", "/proc/cmdline", "", _MS_BIND)
        os.chdir(self.folder or "/tmp")

    def confine(self) -> None:
        """Give up every right, in the program's own process. The filter comes last."""
        for name, value in self.config["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        check(prctl(_PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
        check(prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL), "clear ambient set")
        for cap in self.bounding:
            check(prctl(_PR_CAPBSET_DROP, cap), "drop bounding set")
        check(_libc.capset(self.capability_header, self.no_capabilities), "capset")
        if len(self.filter_code) > 1:
            arguments = (ctypes.c_uint(_SECCOMP_SET_MODE_FILTER), ctypes.c_uint(0))
            check(syscall(_SYS_SECCOMP, *arguments, self.filter_program), "seccomp")


def pidfd_open(pid: int) -> int:
    """A descriptor that can be read from once the process has ended; `os.pidfd_open` is of 3.9."""
    return check(syscall(_SYS_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0)), "pidfd_open")


class PidNamespace:
    """A new pid namespace, whose pid 1 does nothing but be there: killed, it takes all others along.

    Runs in the server. Forking a second interpreter for pid 1 would cost as much as the program's
    own fork; this one is a process of the server's own memory on a stack of its own, in pause(2).
    It reaps nobody: the kernel does, since it ignores SIGCHLD. From inside it can be neither
    killed (it is pid 1, and handles no signal), traced nor read (it holds capabilities that a
    program lacks, and is not dumpable).
    """

    _STACK_BYTES = 1 << 14

    def __init__(self, own: int) -> None:
        """`own`: a descriptor of the server's own pid namespace, from which this one descends. The
        next processes that the server forks will be in the new one."""
        self._stack = ctypes.create_string_buffer(self._STACK_BYTES)
        top = (ctypes.addressof(self._stack) + self._STACK_BYTES) & ~15
        flags = ctypes.c_int(_CLONE_SHARED | signal.SIGCHLD)
        check(_libc.setns(own, _CLONE_NEWPID), "return to the own pid namespace")
        check(_libc.unshare(_CLONE_NEWPID), "unshare the pid namespace")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            self.pid = check(_libc.clone(_pause, ctypes.c_void_p(top), flags, None), "clone")
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
