"""Namespaces, mounts and the giving up of rights: the system calls behind each execution.

Runs inside the worker. Stdlib only; Python has no `clone`, `mount` or `capset`, hence ctypes.
Left out: user ids (one user namespace for the worker's life) and the network, which bubblewrap has
already taken away.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from nanorl.sandbox.protocol import FILTER_PATH

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
_PR_SET_CHILD_SUBREAPER = 36
_SECCOMP_SET_MODE_FILTER = 1

_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: the GIL stays held over a raw clone
_libc.syscall.restype = ctypes.c_long
_pause = ctypes.cast(_libc.pause, ctypes.c_void_p)
_SIG_DFL, _SIG_IGN = ctypes.c_void_p(0), ctypes.c_void_p(1)
# Not signal.signal: its enumerations cost more than the calls, and Python need not know.
_ignore_children = partial(_libc.signal, ctypes.c_int(signal.SIGCHLD), _SIG_IGN)
_await_children = partial(_libc.signal, ctypes.c_int(signal.SIGCHLD), _SIG_DFL)


Step = tuple[Callable[[], int], str]
"""A system call with its arguments made ready, and its name for an error."""


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *args: Any) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *args))


def _prctl_arguments(option: int, arg: int) -> list[Any]:
    return [ctypes.c_int(option), ctypes.c_ulong(arg), *[ctypes.c_ulong(0)] * 3]


def prctl(option: int, arg: int = 0) -> int:
    return int(_libc.prctl(*_prctl_arguments(option, arg)))


def _mounting(source: str, target: str, kind: str, flags: int, data: str = "") -> Step:
    encoded = [s.encode() or None for s in (source, target, kind)]
    call = partial(_libc.mount, *encoded, ctypes.c_ulong(flags), data.encode() or None)
    return call, f"mount {kind or 'private'} on {target}"


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    call, what = _mounting(source, target, kind, flags, data)
    check(call(), what)


def unshare_pids() -> None:
    """The next process that this one forks is pid 1 of a new pid namespace."""
    check(_libc.unshare(_CLONE_NEWPID), "unshare the pid namespace")


def close_from(first: int) -> None:
    """Closes every descriptor from `first` on."""
    if syscall(_SYS_CLOSE_RANGE, *map(ctypes.c_uint, (first, 0xFFFFFFFF, 0))) < 0:
        for name in os.listdir("/proc/self/fd"):  # gVisor's kernel takes no open end
            if int(name) >= first:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(int(name))


class Confinement:
    """Everything that is worked out once, so that a child only makes system calls."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.is_isolated = "namespaces" not in config["ablate"]
        self.folder = ""  # of a session: kept from one execution to the next, as its /tmp is
        self._own_pids = -1
        self._num_processes = config["rlimits"]["RLIMIT_NPROC"]
        self._show = partial(_libc.prctl, *_prctl_arguments(_PR_SET_DUMPABLE, 1))
        self._mounts = self._fresh_mounts()
        header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
        self._give_up: list[Step] = [(partial(_libc.capset, header, bytes(24)), "capset")]
        if "seccomp" not in config["ablate"]:
            with open(FILTER_PATH, "rb") as file:
                self._give_up.append((self._filtering(file.read()), "seccomp"))

    def _fresh_mounts(self) -> list[Step]:
        """The steps that mount what every execution has for itself; the first mount is /tmp."""
        safe = _MS_NOSUID | _MS_NODEV
        return [
            (partial(_libc.unshare, _CLONE_NEWNS | _CLONE_NEWIPC), "unshare mounts and ipc"),
            _mounting("tmpfs", "/tmp", "tmpfs", safe, self._folder_options()),
            _mounting("tmpfs", "/dev/shm", "tmpfs", safe, "size=16m,nr_inodes=1024,mode=1777"),
            # Read-only: oom_score_adj stays. The kernel's command line is the host's affair.
            _mounting("proc", "/proc", "proc", safe | _MS_NOEXEC | _MS_RDONLY),
            _mounting("/dev/null", "/proc/cmdline", "", _MS_BIND),
        ]

    def _folder_options(self) -> str:
        return "size={tmp_bytes},nr_inodes={tmp_inodes},mode=1777".format(**self.config)

    def _filtering(self, code: bytes) -> Callable[[], int]:
        self._filter_code = ctypes.create_string_buffer(code, len(code))
        address = ctypes.addressof(self._filter_code)
        program = struct.pack("<H6xQ", len(code) // 8, address)
        number, mode = ctypes.c_long(_SYS_SECCOMP), ctypes.c_uint(_SECCOMP_SET_MODE_FILTER)
        return partial(_libc.syscall, number, mode, ctypes.c_uint(0), program)

    def give_up_for_all(self) -> None:
        """Once, in the server: gives up what neither it nor, by inheritance, a child needs."""
        for name, value in self.config["rlimits"].items():
            if name != "RLIMIT_NPROC":  # what an interpreter keeps would count against the server
                resource.setrlimit(getattr(resource, name), (value, value))
        check(prctl(_PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
        check(prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL), "clear ambient set")
        for cap in range(64):
            if prctl(_PR_CAPBSET_READ, cap) == 1:
                check(prctl(_PR_CAPBSET_DROP, cap), "drop bounding set")

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
        _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, self._folder_options())

    def make_read_only(self, path: str) -> None:
        """Make a mounted folder read-only for every execution that starts from now on."""
        flags = _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV
        _mount("", path, "", flags)

    def unmount(self, path: str) -> None:
        """Lets go of a mounted folder; its memory is free once no process looks at it."""
        check(_libc.umount2(path.encode(), _MNT_DETACH), f"unmount {path}")

    def isolate(self) -> None:
        """Fresh namespaces and mounts, for the process that is to become the program."""
        check(self._show(), "set dumpable")  # or its own folder in /proc is not its own
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(descriptor, b"1000")
        os.close(descriptor)
        os.setsid()  # or `kill(0, ...)` would reach the server's process group
        if self.is_isolated:
            for step in self._mounts:
                if not (self.folder and step is self._mounts[1]):
                    check(step[0](), step[1])
        os.chdir(self.folder or "/tmp")

    def stand_apart(self) -> None:
        """Protect a process that judges what it starts, before `confine`: no other looks into it,
        and what is orphaned below it becomes its child."""
        check(prctl(_PR_SET_DUMPABLE, 0), "clear dumpable")
        check(prctl(_PR_SET_CHILD_SUBREAPER, 1), "become the parent of orphans")

    def confine(self) -> None:
        """Give up every right, in the program's own process. The filter comes last."""
        limit = self._num_processes
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
        for call, what in self._give_up:
            check(call(), what)


def pidfd_open(pid: int) -> int:
    """A descriptor that can be read from once the process has ended. Not `os.pidfd_open`, which is
    missing where Python was built with older headers."""
    return check(syscall(_SYS_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0)), "pidfd_open")


class PidNamespace:
    """A new pid namespace, whose pid 1 does nothing but be there: its end is that of all others.

    Runs in the server. Forking a second interpreter for pid 1 would cost as much as the program's
    own fork; this one is a process of the server's own memory on a stack of its own, in pause(2).
    It reaps nobody: the kernel does, since it ignores SIGCHLD. From inside it can be neither
    killed (it is pid 1, and handles no signal), traced nor read (it holds capabilities that a
    program lacks, and is not dumpable).
    """

    _STACK_BYTES = 1 << 13

    def __init__(self, own: int) -> None:
        """`own`: a descriptor of the server's own pid namespace, from which this one descends. The
        next processes that the server forks will be in the new one."""
        self._stack = ctypes.create_string_buffer(self._STACK_BYTES)
        top = (ctypes.addressof(self._stack) + self._STACK_BYTES) & ~15
        check(_libc.setns(own, _CLONE_NEWPID), "return to the own pid namespace")
        unshare_pids()
        _ignore_children()  # it keeps this; a child of the server that ends meanwhile has no status
        pid = _libc.clone(_pause, ctypes.c_void_p(top), _CLONE_SHARED | signal.SIGCHLD, None)
        _await_children()
        self.pid = check(pid, "clone")
