"""Memory that several processes map: anonymous files, pooled by their maker, lent by reference.

A segment has no name, so that nothing can be left behind: the kernel frees it when the last process
that has it ends. Its maker writes it once per loan and reuses it when every reader has given it
back, because the first touch of fresh pages costs more than the copy itself.
Left out: huge pages, and giving one part of a segment back before the others.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

MAX_FREE_BYTES = 1 << 30  # of segments that wait for reuse, per process
MIN_BYTES = 1 << 17


class Borrower(Protocol):
    """A channel, as a segment sees it."""

    def forget_soon(self, segment_id: int) -> None: ...


class SharedSegment:
    """One anonymous file. `segment_id` is this process's own number for it."""

    def __init__(self, segment_id: int, fd: int, num_bytes: int, is_own: bool) -> None:
        self.segment_id = segment_id
        self.fd = fd
        self.num_bytes = num_bytes
        self._is_own = is_own
        self.known_to: weakref.WeakSet[Borrower] = weakref.WeakSet()  # they have it mapped

    @cached_property
    def memory(self) -> mmap.mmap:
        """Writable for the maker only, so that what others make of it is read-only."""
        access = mmap.PROT_READ | mmap.PROT_WRITE if self._is_own else mmap.PROT_READ
        return mmap.mmap(self.fd, self.num_bytes, prot=access)

    def __del__(self) -> None:
        os.close(self.fd)
        for borrower in self.known_to:
            borrower.forget_soon(self.segment_id)


class Hold:
    """While it lives, the content of its segment does not change; `let_go` is told at its end."""

    __slots__ = ("_let_go", "segment")

    def __init__(self, segment: SharedSegment, let_go: Callable[[SharedSegment], None]) -> None:
        self.segment = segment
        self._let_go = let_go

    def __del__(self) -> None:
        self._let_go(self.segment)


class Pool:
    """The segments that this process makes, and the numbers of those that it is lent."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._free: list[SharedSegment] = []  # the longest unused first

    def take(self, num_bytes: int) -> Hold:
        """A segment of at least that size; the best fit among the free ones, or a new one."""
        size = max(MIN_BYTES, 1 << (num_bytes - 1).bit_length())  # untouched pages cost nothing
        fitting = [one for one in self._free if size <= one.num_bytes <= 4 * size]
        if fitting:
            segment = min(reversed(fitting), key=lambda one: one.num_bytes)
            self._free.remove(segment)
        else:
            fd = os.memfd_create("nanosched", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            segment = SharedSegment(next(self._ids), fd, size, is_own=True)
        return Hold(segment, self._take_back)

    def adopt(self, fd: int, num_bytes: int) -> SharedSegment:
        """Number a segment of another process."""
        return SharedSegment(next(self._ids), fd, num_bytes, is_own=False)

    def clear(self) -> None:
        """Frees what waits for reuse."""
        self._free.clear()

    def _take_back(self, segment: SharedSegment) -> None:
        self._free.append(segment)
        while sum(one.num_bytes for one in self._free) > MAX_FREE_BYTES:
            del self._free[0]
