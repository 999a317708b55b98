"""Memory that several processes of one machine write and read, without a name in any folder.

    buffer = SharedBuffer(1 << 30)            # allocated and touched here, once
    handle.call(Reader.look, buffer)          # the reader maps the same pages on first use
    buffer.view()[:5] = b"hello"

It is an anonymous memory file: nothing named can be left behind, and the kernel frees it when the
last process has let go of it. A pickled buffer says where it is, as (process, file descriptor,
size), and is opened through `/proc/PID/fd/FD`; so it travels through any channel between processes
of one user on one machine, as long as the process that made it lives and holds it.

Left out: other systems than Linux, other machines, and locks: who may write when is agreed on
elsewhere (nanorl/distributed/weights/version_ledger.py does so for weights).
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import NamedTuple

from nanosched.errors import SchedulerError


class _Place(NamedTuple):
    """The process and descriptor at which a buffer can be opened, and the file that must be found
    there: numbers of processes and descriptors are used again."""

    pid: int
    fd: int
    inode: int
    num_bytes: int


class SharedBuffer:
    """`num_bytes` of zeros, writable in every process that this object is sent to."""

    def __init__(self, num_bytes: int) -> None:
        """`ValueError` for a size that is not positive, SchedulerError where there is no room."""
        if num_bytes <= 0:
            raise ValueError(f"num_bytes={num_bytes}: must be positive")
        if not hasattr(os, "memfd_create"):
            raise SchedulerError("SharedBuffer needs Linux (memfd_create); use another transport")
        if num_bytes > (free := _available_bytes()):  # the kernel would kill somebody for it
            raise SchedulerError(
                f"no room for a shared buffer of {num_bytes / 1e9:.2f} GB: {free / 1e9:.2f} GB of "
                "memory are available; free some, or use another transport"
            )
        fd = os.memfd_create("shared-buffer")
        os.truncate(fd, num_bytes)
        self._place = _Place(os.getpid(), fd, os.fstat(fd).st_ino, num_bytes)
        self._map: mmap.mmap | None = _map(fd, num_bytes)
        self._close: weakref.finalize[..., SharedBuffer] | None = weakref.finalize(
            self, os.close, fd
        )

    @property
    def num_bytes(self) -> int:
        return self._place.num_bytes

    def view(self) -> memoryview:
        """The bytes. Opened on first use in a process; SchedulerError if its maker is gone by
        then. Views stay usable for as long as they are held."""
        if self._map is None:
            self._map = _open(self._place)
        return memoryview(self._map)

    def close(self) -> None:
        """Let go of the memory in this process, as soon as its views are gone; in the process that
        made it, nobody else can open it any more. Idempotent."""
        self._map = None
        if self._close is not None:
            self._close()

    def __reduce__(self) -> tuple[object, ...]:
        return _attach, (self._place,)


def _available_bytes() -> int:
    """The bytes that the kernel says can be taken without swapping."""
    with open("/proc/meminfo") as file:
        found = next(line for line in file if line.startswith("MemAvailable:"))
    return int(found.split()[1]) * 1024


def _attach(place: _Place) -> SharedBuffer:
    buffer = SharedBuffer.__new__(SharedBuffer)
    buffer._place, buffer._map = place, None
    buffer._close = None  # it holds no descriptor
    return buffer


def _open(place: _Place) -> mmap.mmap:
    path = f"/proc/{place.pid}/fd/{place.fd}"
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise SchedulerError(
            f"the shared buffer of process {place.pid} cannot be opened ({error.strerror}): that "
            "process has ended or closed it, or is another user's or another machine's"
        ) from error
    try:
        if os.fstat(fd).st_ino != place.inode:
            raise SchedulerError(f"process {place.pid} has closed the shared buffer")
        return _map(fd, place.num_bytes)
    finally:
        os.close(fd)  # the map has its own hold on the file


def _map(fd: int, num_bytes: int) -> mmap.mmap:
    """With all pages in place: a fault for each 4 KB would cost as much as the copy."""
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
