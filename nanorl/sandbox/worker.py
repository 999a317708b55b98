"""The warm fork server that runs inside bubblewrap: one clean, confined child for each execution.

Processes, outermost first:
    server   pid 1 of the worker; trusted; holds CAP_SYS_ADMIN of its own user namespace
    init     pid 1 of one execution's pid, mount and ipc namespaces; trusted; reaps; no threads
    program  its child: no capabilities, no_new_privs, resource limits, system-call filter

The next child is forked and confined ahead of time and waits for descriptors. The host sends
[payload, stdin, stdout, stderr] over a SEQPACKET socket; the server passes them on unread and
returns one fixed-size RESULT, so neither program text nor output passes through memory that a
later program inherits, and a program holds no descriptor on which a result could be written.

Stdlib only, and one file: the interpreter in here need not be the host's. Runs on Python >= 3.8.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import platform
import random
import resource
import select
import signal
import site
import socket
import struct
import sys
import threading
import time
import types
from typing import Any, NoReturn

GO = struct.Struct("<16sd")  # run id, wall-clock limit in seconds
KILL = struct.Struct("<1s16s")  # b"K", run id: the host has seen enough output
RESULT = struct.Struct("<16sIi4dQ")  # run id, flags, wait status, utime, stime, wall, 0, maxrss
PAYLOAD = struct.Struct("<II")  # bytes of one file's name, bytes of its text; the program first
FLAG_TIMEOUT, FLAG_MEMORY, FLAG_KILLED, FLAG_BROKEN = 1, 2, 4, 8
HELLO = b"ready"
PROGRAM_NAME = "program.py"

_CLONE_FLAGS = 0x00020000 | 0x20000000 | 0x08000000 | signal.SIGCHLD  # NEWNS, NEWPID, NEWIPC
_SYSCALLS = {"x86_64": (56, 317), "aarch64": (220, 277)}
_SYS_CLONE, _SYS_SECCOMP = _SYSCALLS.get(platform.machine(), (0, 0))
_SYS_CLOSE_RANGE = 436
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_READ, _PR_CAPBSET_DROP = 1, 4, 23, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_SECCOMP_SET_MODE_FILTER = 1
_WATCH_PERIOD_S = 0.05

_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: the GIL stays held over a raw clone
_libc.syscall.restype = ctypes.c_long
_exit = os._exit  # a program may replace the attribute


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, *args: Any) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *args))


def _prctl(option: int, arg: int = 0) -> int:
    zero = ctypes.c_ulong(0)
    return int(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(arg), zero, zero, zero))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    encoded = [s.encode() or None for s in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None)
    _check(result, f"mount {kind or 'private'} on {target}")


class _Confinement:
    """Everything that is worked out once, so that a child only makes system calls."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.is_isolated = "namespaces" not in config["ablate"]
        bounding = [cap for cap in range(64) if _prctl(_PR_CAPBSET_READ, cap) == 1]
        self.bounding = bounding
        self.capability_header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
        self.no_capabilities = bytes(24)
        code = b"" if "seccomp" in config["ablate"] else _read_file("/sbx/filter.bpf")
        self.filter_code = ctypes.create_string_buffer(code, max(len(code), 1))
        self.filter_program = struct.pack(
            "<H6xQ", len(code) // 8, ctypes.addressof(self.filter_code)
        )

    def isolate(self) -> None:
        """Fresh mounts for the namespaces that `clone` has just made. Runs as the new pid 1."""
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        if self.is_isolated:
            safe = _MS_NOSUID | _MS_NODEV
            size, inodes = self.config["tmp_bytes"], self.config["tmp_inodes"]
            _mount("", "/", "", _MS_REC | _MS_PRIVATE)
            _mount("tmpfs", "/tmp", "tmpfs", safe, f"size={size},nr_inodes={inodes},mode=1777")
            _mount("tmpfs", "/dev/shm", "tmpfs", safe, "size=16m,nr_inodes=1024,mode=1777")
            _mount("proc", "/proc", "proc", safe | _MS_NOEXEC)
        os.chdir("/tmp")
        _check(_prctl(_PR_SET_DUMPABLE, 0), "clear dumpable")

    def confine(self) -> None:
        """Give up every right, in the program's own process. The filter comes last."""
        _check(_prctl(_PR_SET_DUMPABLE, 1), "set dumpable")
        for name, value in self.config["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
        zero = ctypes.c_ulong(0)
        _libc.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(_PR_CAP_AMBIENT_CLEAR_ALL), zero, zero, zero)
        for cap in self.bounding:
            _check(_prctl(_PR_CAPBSET_DROP, cap), "drop bounding set")
        _check(_libc.capset(self.capability_header, self.no_capabilities), "capset")
        if len(self.filter_code) > 1:
            arguments = (ctypes.c_uint(_SECCOMP_SET_MODE_FILTER), ctypes.c_uint(0))
            _check(_syscall(_SYS_SECCOMP, *arguments, self.filter_program), "seccomp")


class _Child:
    """One prespawned execution: its init and the socket to it."""

    def __init__(self, confinement: _Confinement, control: socket.socket) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = _CLONE_FLAGS if confinement.is_isolated else signal.SIGCHLD
        zero = ctypes.c_ulong(0)
        self.pid = _syscall(_SYS_CLONE, ctypes.c_ulong(flags), zero, zero, zero, zero)
        if self.pid == 0:
            _run_or_die(_init_main, confinement, theirs, (self.sock, control))
        theirs.close()
        _check(self.pid, "clone")

    def is_ready(self) -> bool:
        """Waits until the child has confined itself; False if it could not."""
        return self.sock.recv(8) == b"R"

    def reap(self) -> resource.struct_rusage:
        """Kills what is left. When this returns no process of the execution exists."""
        os.kill(self.pid, signal.SIGKILL)
        usage = os.wait4(self.pid, 0)[2]
        self.sock.close()
        return usage


def _run_or_die(function: Any, *args: Any) -> NoReturn:
    try:
        function(*args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        _exit(125)


def _init_main(
    confinement: _Confinement, sock: socket.socket, others: tuple[socket.socket, ...]
) -> None:
    for other in others:
        other.close()
    confinement.isolate()
    pid = os.fork()
    if pid == 0:
        _run_or_die(_program_main, confinement, sock)
    while True:
        reaped, status = os.wait()
        if reaped == pid:
            sock.send(struct.pack("<i", status))
            os._exit(0)


def _program_main(confinement: _Confinement, sock: socket.socket) -> None:
    if not confinement.is_isolated:
        _check(_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "pdeathsig")
    confinement.confine()
    sock.send(b"R")
    message, descriptors = _receive(sock)
    limit_s = GO.unpack(message)[1]
    cpu_s = int(limit_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    code = _lay_files(descriptors[0])
    for target, descriptor in enumerate(descriptors[1:4]):
        os.dup2(descriptor, target)
    _check(_syscall(_SYS_CLOSE_RANGE, *map(ctypes.c_uint, (3, 0xFFFFFFFF, 0))), "close_range")
    sock.detach()
    _renew_streams()
    gc.enable()
    random.seed(0)  # the module reseeds itself after every fork
    _execute(code)


def _lay_files(descriptor: int) -> bytes:
    """Writes the payload's files into the working directory; returns the program's text."""
    payload = memoryview(_read_all(descriptor))
    files, position = [], 0
    while position < len(payload):
        name_bytes, text_bytes = PAYLOAD.unpack_from(payload, position)
        middle = position + PAYLOAD.size + name_bytes
        name = bytes(payload[position + PAYLOAD.size : middle]).decode()
        position = middle + text_bytes
        files.append((name, bytes(payload[middle:position])))
    for name, text in files:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with open(descriptor, "wb", buffering=0) as file:
            file.write(text)
    return files[0][1]


def _renew_streams() -> None:
    """Standard streams over the new descriptors, configured as `python program.py` has them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
        buffered: Any = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        errors = "backslashreplace" if number == 2 else "strict"
        stream = io.TextIOWrapper(buffered, "utf-8", errors, line_buffering=number == 2)
        raw.name = f"<{name}>"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _execute(code: bytes) -> NoReturn:
    """Runs the text as `__main__` and leaves the way the interpreter would."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=PROGRAM_NAME, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exit_code = 0
    try:
        exec(compile(code, PROGRAM_NAME, "exec", dont_inherit=True), main.__dict__)
    except BaseException as error:
        exit_code = _report(error)
    exit_code = _shut_down(exit_code)
    _exit(exit_code & 0xFF)


def _report(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        _flush(sys.stdout)
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    _flush(sys.stdout)
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _shut_down(exit_code: int) -> int:
    """Threads, exit handlers, buffers: in the order of Py_FinalizeEx."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    is_flushed = _flush(sys.stdout)
    _flush(sys.stderr)
    return exit_code if is_flushed else exit_code or 120


def _flush(stream: Any) -> bool:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except BaseException:  # the program's own stream object: whatever it raises is its failure
        return False
    return True


def _read_all(descriptor: int) -> bytes:
    chunks = []
    while chunk := os.read(descriptor, 1 << 20):
        chunks.append(chunk)
    return b"".join(chunks)


def _read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    message, ancillary, _, _ = sock.recvmsg(4096, socket.CMSG_SPACE(16))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    return message, list(descriptors)


def resident_bytes() -> int:
    """Private and shared memory of every process in the worker, this one left out."""
    total_kib = 0
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or entry == "1":
            continue
        try:
            lines = _read_file(f"/proc/{entry}/status").split(b"\n")
        except OSError:  # gone in the meantime
            continue
        for line in lines:
            if line.startswith((b"RssAnon:", b"RssShmem:")):
                total_kib += int(line.split()[1])
    return total_kib * 1024


class _Server:
    """Serves one run at a time until the host closes the control socket."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control = control
        self.watch_bytes = config["watch_bytes"]
        self.confinement = _Confinement(config)
        self.child = _Child(self.confinement, control)

    def serve(self) -> None:
        self.control.send(HELLO if self.child.is_ready() else b"broken")
        is_ready = True
        while True:
            message, descriptors = _receive(self.control)
            if not message:
                return
            if len(message) != GO.size:
                continue  # a kill for a run that has ended
            if not is_ready and not self.child.is_ready():
                self._respawn()
            result = self._run(message, descriptors)
            self.control.send(result)
            self.child = _Child(self.confinement, self.control)
            is_ready = False

    def _respawn(self) -> None:
        """The waiting child died (say, of the memory limit): once more, then give up."""
        self.child.reap()
        self.child = _Child(self.confinement, self.control)
        if not self.child.is_ready():
            raise SystemExit("the confined child does not start")

    def _run(self, message: bytes, descriptors: list[int]) -> bytes:
        run_id, limit_s = GO.unpack(message)
        start = time.monotonic()
        self.child.sock.sendmsg(
            [message],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))],
        )
        for descriptor in descriptors:
            os.close(descriptor)
        flags, status = self._wait(run_id, start + limit_s)
        usage = self.child.reap()
        wall_s = time.monotonic() - start
        seconds = usage.ru_utime, usage.ru_stime, wall_s, 0.0
        return RESULT.pack(run_id, flags, status, *seconds, usage.ru_maxrss)

    def _wait(self, run_id: bytes, deadline: float) -> tuple[int, int]:
        """(flags, wait status) of the program; a status of -1 says that init was killed."""
        child, control = self.child.sock.fileno(), self.control.fileno()
        poller = select.poll()
        poller.register(child, select.POLLIN)
        poller.register(control, select.POLLIN)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return FLAG_TIMEOUT, -1
            period_s = min(left_s, _WATCH_PERIOD_S) if self.watch_bytes else left_s
            ready = [fd for fd, _ in poller.poll(period_s * 1000 + 1)]
            if child in ready:
                packet = self.child.sock.recv(8)
                return (
                    (0, struct.unpack("<i", packet)[0]) if len(packet) == 4 else (FLAG_BROKEN, -1)
                )
            if control in ready:
                packet = self.control.recv(64)
                if not packet:
                    os._exit(0)  # the host is gone, and with this process the whole worker
                if packet == KILL.pack(b"K", run_id):
                    return FLAG_KILLED, -1
            if not ready and self.watch_bytes and resident_bytes() > self.watch_bytes:
                return FLAG_MEMORY, -1


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    config = json.loads(control.recv(1 << 16))
    for name in config["preload"]:
        importlib.import_module(name)
    os.environ.pop("PWD", None)
    site.setquit()  # -S leaves out exit() and quit(), which programs do call
    sys.argv[:] = [PROGRAM_NAME]
    sys.path[0] = "/tmp"
    gc.collect()
    gc.freeze()
    gc.disable()
    _Server(control, config).serve()


if __name__ == "__main__":
    main()
