"""The memory watch: a wall limit is not late because there is much to count."""

from __future__ import annotations

import itertools
import mmap
import os
from types import SimpleNamespace

import pytest

from nanorl.sandbox import usage


def test_counting_exactly_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_other_pids", lambda: [str(os.getpid())] * 100_000)
    looks = itertools.count()
    monkeypatch.setattr(usage, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    assert usage.MemoryWatch().exact_bytes(1 << 62, deadline=5) > 0
    assert next(looks) == 6, "the clock is looked at before each process, of which five are counted"


def test_counting_exactly_ends_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    this = [str(os.getpid())]
    monkeypatch.setattr(usage, "_other_pids", lambda: this)
    one = usage.MemoryWatch().exact_bytes(1 << 62, float("inf"))
    monkeypatch.setattr(usage, "_other_pids", lambda: this * 100_000)
    few = usage.MemoryWatch().exact_bytes(2 * one, float("inf"))
    assert 2 * one < few < 4 * one


def test_the_upper_bound_is_above_the_exact_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_other_pids", lambda: [str(os.getpid())])
    # sockets are those of the whole machine here, where other tests open and close theirs
    monkeypatch.setattr(usage.MemoryWatch, "_sockets_bytes", lambda self: 0)
    watch, size = usage.MemoryWatch(), 256 << 20
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        before = watch.exact_bytes(1 << 62, float("inf"))
        assert before <= watch.most_bytes()
        piece = b"x" * (1 << 20)  # a large one may stay with the allocator and count as well
        for _ in range(0, size, len(piece)):
            pages.write(piece)
        after = watch.exact_bytes(1 << 62, float("inf"))
        assert after <= watch.most_bytes()
    assert size / 2 < after - before < 2 * size
