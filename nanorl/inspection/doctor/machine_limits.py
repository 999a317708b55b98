"""Memory and cores that this process may use: the machine's, or less where a cgroup says so.

Containers and batch systems bound a process by control groups, of version 1 or 2, in folders around
its own. Everything is read under `root`, so that a test can lay out a machine.
"""

from __future__ import annotations

import os
from pathlib import Path

NO_LIMIT = 1 << 62
"""Bytes. A limit above it is how version 1 says that there is none."""


def free_memory_bytes(root: Path = Path("/")) -> int:
    """The memory that is available, or that a cgroup's limit leaves where that is less, in bytes.

    Read from /proc and /sys/fs/cgroup under `root`, of either version. A cgroup's page cache that
    is not in use counts as free, as it does in MemAvailable.
    """
    free = _meminfo("MemAvailable", root)
    return min([free, *(_left(folder) for folder in _cgroups(root, "memory"))])


def total_memory_bytes(root: Path = Path("/")) -> int:
    """The memory of the machine, whoever may use it."""
    return _meminfo("MemTotal", root)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The least limit of the memory cgroups around this process; None where there is none."""
    least = min((_memory_limit(folder) for folder in _cgroups(root, "memory")), default=NO_LIMIT)
    return least if least < NO_LIMIT else None


def cpu_limit(root: Path = Path("/")) -> float | None:
    """The cores' worth of time that the cgroups around this process grant; None: no limit."""
    limits = [one for one in map(_cores, _cgroups(root, "cpu")) if one is not None]
    return min(limits, default=None)


def usable_cores() -> int:
    """The cores that the scheduler may put this process on."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has not
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _meminfo(wanted: str, root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        name, _, amount = line.partition(":")
        if name == wanted:
            return int(amount.split()[0]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's cgroup of that controller and of those around it."""
    base = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controller if controllers else base
        own = top / path.lstrip("/")
        folders += [own, *(one for one in own.parents if one == top or top in one.parents)]
    return folders


def _memory_limit(folder: Path) -> int:
    for name in ("memory.max", "memory.limit_in_bytes"):
        lines = _lines(folder / name)
        if lines and lines[0].isdigit():
            return int(lines[0])
    return NO_LIMIT


def _left(folder: Path) -> int:
    for limit_file, usage_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _lines(folder / limit_file), _lines(folder / usage_file)
        if limit and usage and limit[0].isdigit():
            stat = dict(line.split() for line in _lines(folder / "memory.stat"))
            return int(limit[0]) - int(usage[0]) + int(stat.get(cache, 0))
    return NO_LIMIT


def _cores(folder: Path) -> float | None:
    both = _lines(folder / "cpu.max")
    words = both[0].split() if both else []
    if not words:
        files = (folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        words = [lines[0] for file in files if (lines := _lines(file))]
    if len(words) != 2 or not words[0].isdigit():  # max, or -1
        return None
    return int(words[0]) / int(words[1])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # not every kernel has every file
        return []
