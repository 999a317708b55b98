"""`AgentBox`: bubblewrap around one agent program, whose only network is one port that it is given.

    box = AgentBox(readable=[Path("mine.py")])
    argv, descriptors = box.command(GUARD, ["7"])     # what the program's guard starts as
    box.close()                                       # once it has ended

Beside the walls of every sandbox (bwrap.py): the Python environment of this process, read-only, so
that the program finds the packages it was written with; a working folder and a /tmp in memory, both
of limited size; a loopback device and nothing behind it; sockets of the internet families for it;
no capability at all. Nothing else of the host is there but what `readable` names.
Left out: a warm server inside, since programs bring interpreters and imports of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanorl.sandbox import memory_limits as memory
from nanorl.sandbox import seccomp, usage
from nanorl.sandbox.base import SandboxSpec
from nanorl.sandbox.bwrap import unused_uid, wall_flags
from nanorl.sandbox.execution import memory_file
from nanorl.sandbox.host_machine import find_bwrap, is_readable, reachable

FOLDER = "/box"
"""The working folder inside."""
_MIB = 1 << 20
_INSIDE = "/sbx"
_WATCH_S = 0.25
_indices = itertools.count(64)


@dataclass(kw_only=True)
class AgentBox:
    """The walls around one life of one program. `close()` gives back what it holds."""

    readable: Sequence[Path] = ()
    """Files and folders that the program sees, where they are, read-only."""
    memory_bytes: int = 2048 * _MIB
    """Of all its processes together, the working folder included."""
    folder_bytes: int = 256 * _MIB
    """Size of the working folder, and of /tmp."""
    max_processes: int = 256
    """Threads count as processes."""
    folder: str = field(default=FOLDER, init=False)

    def __post_init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._cgroup = memory.create(self.memory_bytes, self.max_processes)

    @property
    def watch_bytes(self) -> int:
        """The memory that the guard has to watch, in bytes; 0 where the kernel does."""
        return 0 if self._cgroup else self.memory_bytes

    @property
    def watch_folders(self) -> list[str]:
        """Folders inside that are memory, too."""
        return [FOLDER, "/tmp", "/dev/shm"]

    async def overrun(self, pid: int) -> None:
        """Returns once all below the process `pid` together take more than they may.

        From outside, where the program cannot reach; the guard inside is the quicker of the two.
        Waits for ever where the kernel counts.
        """
        while not self.watch_bytes or usage.tree_bytes(pid) <= self.watch_bytes:
            await asyncio.sleep(_WATCH_S)

    @property
    def is_out_of_memory(self) -> bool:
        """True where the kernel has killed for it."""
        return self._cgroup is not None and self._cgroup.num_oom_kills() > 0

    def rlimits(self) -> dict[str, int]:
        """Limits of each process."""
        return {
            "RLIMIT_FSIZE": self.folder_bytes,
            "RLIMIT_NPROC": self.max_processes,
            "RLIMIT_NOFILE": 1024,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 65536,
        }

    def command(self, guard: Path, arguments: Sequence[str]) -> tuple[list[str], tuple[int, ...]]:
        """The command that runs the script `guard` inside, and the descriptors that it inherits.

        SandboxUnavailable where there is no bubblewrap.
        """
        bwrap = self._stack.enter_context(reachable(find_bwrap(SandboxSpec())[0]))
        descriptors: list[int] = []
        flags = wall_flags()
        size = ["--size", str(self.folder_bytes), "--tmpfs"]
        flags += [*size, FOLDER, *size, "/tmp", "--symlink", "/tmp", "/var/tmp"]
        flags += ["--size", str(16 * _MIB), "--tmpfs", "/dev/shm"]
        shown = []  # after /tmp, which would hide what lies there
        for path in (*python_folders(), *self.readable):
            source = path
            if not is_readable(path):
                source = self._place(path)
                shown.append(f"{path}={source}")
            flags += ["--ro-bind", str(source), str(path)]
        data = {
            f"{_INSIDE}/guard.py": guard.read_bytes(),
            f"{_INSIDE}/nanorl/sandbox/usage.py": Path(usage.__file__).read_bytes(),
            "/etc/passwd": b"sandbox:x:1000:1000::/tmp:/bin/sh\n",
            "/etc/hosts": b"127.0.0.1 localhost\n",
        }
        for inside, content in data.items():
            descriptors.append(self._memfd(content))
            flags += ["--ro-bind-data", str(descriptors[-1]), inside]
        descriptors.append(self._memfd(seccomp.filter_bytes(platform.machine(), True)))
        flags += ["--seccomp", str(descriptors[-1])]
        flags += ["--remount-ro", "/dev", "--remount-ro", "/", "--"]
        procs = ":".join(self._cgroup.procs) if self._cgroup else "-"
        launcher = str(Path(memory.__file__).with_name("launcher.py"))
        return [
            *(sys.executable, "-I", "-S", launcher, str(unused_uid(next(_indices))), procs, *shown),
            *("--", str(bwrap), *flags, sys.executable, "-s", "-S", "-B"),
            *(f"{_INSIDE}/guard.py", *arguments),
        ], tuple(descriptors)

    def close(self) -> None:
        """Call it when the program has ended. Closing twice is fine."""
        self._stack.close()
        if self._cgroup:
            self._cgroup.kill()
            self._cgroup.remove()

    def _place(self, path: Path) -> Path:
        """An empty file or folder that everybody reaches, to show something private at."""
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="nanorl-box-"))
        os.chmod(folder, 0o755)
        place = Path(folder, path.name)
        place.mkdir() if path.is_dir() else place.touch()
        return place

    def _memfd(self, content: bytes) -> int:
        descriptor = memory_file("sandbox-data", content)
        self._stack.callback(os.close, descriptor)
        return descriptor


def python_folders() -> list[Path]:
    """The folders in which this interpreter and its packages lie, without what comes with /usr."""
    real = Path(sys.executable).resolve().parent.parent
    wanted = dict.fromkeys([Path(sys.prefix), Path(sys.base_prefix), real])
    folders = [one for one in wanted if not one.is_relative_to("/usr")]
    return [
        one for one in folders if not any(one != up and one.is_relative_to(up) for up in folders)
    ]
