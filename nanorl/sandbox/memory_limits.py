"""A memory cgroup for each worker, version 2 or 1, wherever this process may create one.

The kernel then sums the memory of all processes of a worker, files in its /tmp included, and says
when it killed for it; some kilobytes in time, where the server's own watch (usage.py, every 50 ms
or less) is late. Where no cgroup can be created (a plain user, most containers) `create` returns
None and that watch is all there is.
`oom.group` stays off: it would kill the server with the program.
Left out: cpu.max, since the pool runs one program at a time on each worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_PREFIX = "nanorl-sandbox-"
# What the worker itself needs beside the program: the server, its waiting child, kernel memory.
_OVERHEAD_BYTES = 48 << 20
_OVERHEAD_PROCESSES = 8


class WorkerCgroup:
    """The folders of one worker's group; with version 1 one for each controller."""

    def __init__(self, version: int, folders: dict[str, Path]) -> None:
        self.version = version
        self.folders = folders
        self._events = -1

    @property
    def name(self) -> str:
        return f"cgroup-v{self.version}"

    @property
    def procs(self) -> list[str]:
        return [str(folder / "cgroup.procs") for folder in dict.fromkeys(self.folders.values())]

    def limit(self, memory_bytes: int, max_processes: int) -> None:
        memory, pids = self.folders["memory"], self.folders.get("pids")
        num_bytes = str(memory_bytes + _OVERHEAD_BYTES)
        if self.version == 2:
            _write(memory / "memory.max", num_bytes)
            _write_if_there(memory / "memory.swap.max", "0")
        else:
            _write(memory / "memory.limit_in_bytes", num_bytes)
            _write_if_there(memory / "memory.swappiness", "0")
        if pids is not None:
            _write(pids / "pids.max", str(max_processes + _OVERHEAD_PROCESSES))

    def num_oom_kills(self) -> int:
        """Read after every run, hence from one open descriptor."""
        if self._events < 0:
            name = "memory.events" if self.version == 2 else "memory.oom_control"
            self._events = os.open(self.folders["memory"] / name, os.O_RDONLY | os.O_CLOEXEC)
        for line in os.pread(self._events, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
        return 0

    def kill(self) -> None:
        """Kills every process of the group; a second wall behind bubblewrap's."""
        for path in self.procs:
            with contextlib.suppress(OSError):
                for pid in Path(path).read_text().split():
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """Removes the folders; they stay busy for a moment after the last process has died."""
        if self._events >= 0:
            os.close(self._events)
            self._events = -1
        for folder in dict.fromkeys(self.folders.values()):
            for _ in range(50):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)


def create(memory_bytes: int, max_processes: int) -> WorkerCgroup | None:
    """A group with these limits, or None where none with a memory limit can be made."""
    name = f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    for version in (2, 1):
        folders: dict[str, Path] = {}
        try:
            for controller in ("memory", "pids"):
                parent = _find_parent(version, controller)
                if parent is None and controller == "memory":
                    break
                if parent is not None:
                    folders[controller] = parent / name
                    folders[controller].mkdir(exist_ok=True)
            if not folders:
                continue
            group = WorkerCgroup(version, folders)
            group.limit(memory_bytes, max_processes)
            return group
        except OSError:  # not ours to write: try the next, then the watcher
            WorkerCgroup(version, folders).remove()
    return None


def sweep() -> None:
    """Removes empty groups left by processes that were killed."""
    for version in (2, 1):
        for controller in ("memory", "pids"):
            parent = _find_parent(version, controller)
            for folder in parent.glob(f"{_PREFIX}*") if parent else ():
                pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
                if not os.path.exists(f"/proc/{pid}"):
                    with contextlib.suppress(OSError):
                        folder.rmdir()


def _find_parent(version: int, controller: str) -> Path | None:
    """The folder in which this process may create groups with the controller."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, mount, kind, options, *_ in mounts:
        if kind != ("cgroup2" if version == 2 else "cgroup"):
            continue
        if version == 1 and controller not in options.split(","):
            continue
        for _, controllers, path in own:
            if (
                controllers.split(",") != [""]
                if version == 2
                else (controller not in controllers.split(","))
            ):
                continue
            for folder in (Path(mount + path), Path(mount + path).parent, Path(mount)):
                if _can_hold(folder, version, controller):
                    return folder
    return None


def _can_hold(folder: Path, version: int, controller: str) -> bool:
    if not (folder / "cgroup.procs").exists() or not os.access(folder, os.W_OK):
        return False
    if version == 1:
        return True
    with contextlib.suppress(OSError):
        return controller in (folder / "cgroup.subtree_control").read_text().split()
    return False


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _write_if_there(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.write_text(text)
