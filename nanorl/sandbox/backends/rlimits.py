"""`rlimits`: a process with limits, and no wall at all. Only with `--allow-unsafe-sandbox`.

Started by root, the programs run under an unused user id each, and in a memory cgroup where one can
be made; a plain user's programs are that user's processes. They have the machine's network, see its
processes and read what everybody may read. What is stopped: crashes, endless loops, memory of one
process, floods of output; whatever else, only by the ordinary rights of the user id.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nanorl.sandbox import memory_limits as memory
from nanorl.sandbox import protocol
from nanorl.sandbox.backends.box import ENVIRONMENT, PYTHON_FLAGS, Launch, guest_config
from nanorl.sandbox.base import SandboxSpec, SandboxUnavailable
from nanorl.sandbox.bwrap import rlimits, unused_uid
from nanorl.sandbox.canary import CODE
from nanorl.sandbox.interpreter import find_python

_NO_TESTS = "tests cannot be kept from the program that they test"
_SERVERS_PROCESSES = 4


class RlimitsBackend:
    """Starts guests as ordinary processes."""

    tier = "rlimits"
    runs_per_box = 1
    start_limit_s = 30.0
    question = CODE
    refused_jobs: Mapping[int, str] = {
        protocol.LAY_TESTS: _NO_TESTS,
        protocol.TEST: _NO_TESTS,
        protocol.VERIFY: _NO_TESTS,
    }
    # A wall to leave out, so that tests can show that they would notice. Never set it otherwise.
    keeps_user = False

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.python = find_python(spec)
        self.details = {"python": str(self.python.path)}
        probe = memory.create(spec.memory_bytes, spec.max_processes)
        self.memory = probe.name if probe else ""
        if probe:
            probe.remove()

    @property
    def promises(self) -> Mapping[str, Any]:
        promised = {
            "new privileges": 1,
            "descriptors": min(self.spec.max_open_files, 128 if not self.memory else 1 << 30),
            "core dumps": 0,
            "variables": sorted(ENVIRONMENT),
        }
        if os.geteuid() == 0 and not self.keeps_user:
            promised["held capabilities"] = 0
        return promised

    def launch(self, index: int) -> Launch:
        uid = -1 if self.keeps_user else unused_uid(index)
        folder = self._folder(uid)
        group = memory.create(self.spec.memory_bytes, self.spec.max_processes)
        procs = ":".join(group.procs) if group else "-"
        launcher = str(Path(memory.__file__).with_name("launcher.py"))
        return Launch(
            argv=[
                *(sys.executable, "-I", "-S", launcher, str(uid), procs, "--"),
                *(str(self.python.path), *PYTHON_FLAGS),
            ],
            environment=ENVIRONMENT,
            config=guest_config(
                self.spec,
                root=str(folder),
                rlimits=self._rlimits(group is not None, uid),
                watch_bytes=0,
                **self._fences(folder),
            ),
            end=partial(_end, uid, folder, group),
            num_oom_kills=group.num_oom_kills if group else lambda: 0,
        )

    def _fences(self, folder: Path) -> dict[str, Any]:
        """The settings that stronger back ends tell the guest besides."""
        return {}

    def _folder(self, uid: int) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="nanorl-box-"))
        for name in ("/tmp", *protocol.FOLDERS):
            Path(f"{folder}{name}").mkdir()
        if uid >= 0:
            for path in (folder, *folder.iterdir()):
                os.chown(path, uid, uid)
        return folder

    def _rlimits(self, has_cgroup: bool, uid: int) -> dict[str, int]:
        limits = rlimits(self.spec, has_cgroup)
        if not has_cgroup:
            limits["RLIMIT_AS"] = self.spec.memory_bytes
        limits["RLIMIT_NPROC"] += _SERVERS_PROCESSES
        if uid < 0:  # the kernel counts every process of the user
            limits["RLIMIT_NPROC"] += _num_threads_of_user()
        return limits

    def explain(self, messages: str) -> SandboxUnavailable:
        return SandboxUnavailable(
            f"--sandbox {self.tier}: {messages}", "use --sandbox bwrap, which isolates as well"
        )

    def close(self) -> None:
        """Nothing was made for all boxes together."""


def _end(uid: int, folder: Path, group: memory.WorkerCgroup | None, is_gone: bool) -> None:
    """Kills what the guest left, as far as it can be told from others, and removes the folder."""
    if group is not None:
        while _is_populated(group):
            group.kill()
    elif uid >= 0:
        while _kill_user(uid):
            pass
    shutil.rmtree(folder, ignore_errors=True)
    if group is not None:
        group.remove()


def _is_populated(group: memory.WorkerCgroup) -> bool:
    with suppress(OSError):
        return any(Path(path).read_text().strip() for path in group.procs)
    return False


def _kill_user(uid: int) -> bool:
    """Kill all processes of a user; True if there were any. Zombies are somebody else's to bury."""
    was_any = False
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    os.kill(int(entry.name), signal.SIGKILL)
                    was_any = True
    return was_any


def _num_threads_of_user() -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.geteuid():
                count += len(os.listdir(entry / "task"))
    return count
