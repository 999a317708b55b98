"""`gvisor`: a kernel in user space answers the program's system calls; the host's kernel sees few.

Started as `runsc run` with a bundle of ours: /usr of this machine and the loader's files read-only,
empty folders in memory, no network, no user with rights. The guest is root of that little world,
so that programs, under another user, cannot reach it. `--image FOLDER` gives another root.
Costs about 70 MiB and a fifth of a second a box. `ptrace` is the platform that runs everywhere.
Left out: gVisor as the runtime of podman or docker, its checkpoints.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nanorl.sandbox import memory_limits as memory
from nanorl.sandbox import protocol, seccomp
from nanorl.sandbox.backends.box import ENVIRONMENT, PYTHON_FLAGS, Launch, guest_config
from nanorl.sandbox.base import MIB, SandboxSpec, SandboxUnavailable
from nanorl.sandbox.bwrap import rlimits
from nanorl.sandbox.canary import CODE, walls_without
from nanorl.sandbox.interpreter import find_python

_FLAGS = "--platform=ptrace --network=none --ignore-cgroups --overlay=false"
_REMEDY = "install gVisor (`apt install runsc`, https://gvisor.dev) and run as root"
_USER = 1000
_KERNELS_BYTES = 256 * MIB  # gVisor's own, and its file server's
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DISK_BYTES = 16 * MIB  # of /dev/shm


class GvisorBackend:
    """Starts guests under runsc."""

    tier = "gvisor"
    runs_per_box = 1
    start_limit_s = 60.0
    question = CODE
    refused_jobs: Mapping[int, str] = {}

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        found = shutil.which("runsc", path="/usr/bin:/usr/local/bin:/bin")
        if found is None:
            raise self.explain("runsc is not installed")
        if os.geteuid() != 0:
            raise self.explain("runsc needs root for its mounts")
        self.runsc = found
        self.python = find_python(spec)
        self._folder = tempfile.TemporaryDirectory(prefix="nanorl-gvisor-")
        probe = memory.create(spec.memory_bytes, spec.max_processes)
        self.memory = f"{probe.name} and the guest's watch" if probe else "the guest's watch"
        if probe:
            probe.remove()
        self.details = {"runsc": found, "python": str(self.python.path)}

    @property
    def promises(self) -> Mapping[str, Any]:
        """Bubblewrap's, but for what the other kernel does not have."""
        return {
            **walls_without("processes", "capabilities", "host's folders"),
            "held capabilities": 0,
            "host's file": False,
            "strangers": [],
            "files in /tmp": [protocol.PROGRAM_NAME],
            "core dumps": 0,
            "variables": sorted(ENVIRONMENT),
        }

    def launch(self, index: int) -> Launch:
        name = f"nanorl-{os.getpid()}-{os.urandom(6).hex()}"
        bundle = Path(self._folder.name, name)
        (bundle / "rootfs").mkdir(parents=True)
        (bundle / "config.json").write_text(json.dumps(self._bundle()))
        state = Path(self._folder.name, "state")
        runsc = [self.runsc, *_FLAGS.split(), f"--root={state}"]
        most = self.spec.memory_bytes + _KERNELS_BYTES
        group = memory.create(most, self.spec.max_processes + 256)
        procs = ":".join(group.procs) if group else "-"
        launcher = str(Path(memory.__file__).with_name("launcher.py"))
        return Launch(
            argv=[
                *("/usr/bin/python3", "-I", "-S", launcher, "-1", procs, "--"),
                *(*runsc, "run", f"--bundle={bundle}", name),
            ],
            environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            config=guest_config(
                self.spec,
                user=_USER,
                rlimits=_rlimits(self.spec),
                filter=base64.b64encode(seccomp.filter_bytes(platform.machine())).decode(),
            ),
            end=partial(_end, runsc, name, bundle, group),
            num_oom_kills=group.num_oom_kills if group else lambda: 0,
            leave_s=5.0,
        )

    def _bundle(self) -> dict[str, Any]:
        """The OCI bundle of one box."""
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": [str(self.python.path), *PYTHON_FLAGS],
                "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
                "cwd": "/",
                "noNewPrivileges": True,
                "capabilities": _capabilities("CAP_SETUID", "CAP_SETGID", "CAP_KILL"),
                "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
            },
            "root": {"path": "rootfs", "readonly": True},
            "hostname": "sandbox",
            "mounts": self._mounts(),
            "linux": {"namespaces": [{"type": kind} for kind in _NAMESPACES]},
        }

    def _mounts(self) -> list[dict[str, Any]]:
        mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}]
        folders = [Path("/usr"), *(Path("/", name) for name in _LINKS), *self.python.files]
        folders += [Path("/etc/ld.so.cache"), Path("/etc/alternatives"), Path("/etc/localtime")]
        for path in folders:
            if path.exists():
                mounts.append(_mount(str(path), "bind", str(path.resolve()), ["ro", "rbind"]))
        size = f"size={self.spec.tmp_bytes}"
        for name in ("/tmp", *protocol.FOLDERS, protocol.TESTS, protocol.LOGS):
            mounts.append(_mount(name, "tmpfs", "tmpfs", ["mode=1777", size, "nosuid", "nodev"]))
        shared = ["mode=1777", f"size={_DISK_BYTES}", "nosuid", "nodev"]
        return [*mounts, _mount("/dev/shm", "tmpfs", "tmpfs", shared)]

    def explain(self, messages: str) -> SandboxUnavailable:
        return SandboxUnavailable(f"--sandbox gvisor: {messages}", _REMEDY)

    def close(self) -> None:
        self._folder.cleanup()


_RLIMITS = ("RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_NPROC")
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")


def _rlimits(spec: SandboxSpec) -> dict[str, int]:
    """Those that its kernel knows."""
    limits = rlimits(spec, has_cgroup=True)
    return {name: limits[name] for name in _RLIMITS}


def _mount(destination: str, kind: str, source: str, options: list[str]) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": options}


def _capabilities(*names: str) -> dict[str, list[str]]:
    return {kind: list(names) for kind in ("bounding", "effective", "permitted")}


def _end(
    runsc: list[str],
    name: str,
    bundle: Path,
    group: memory.WorkerCgroup | None,
    is_gone: bool,
) -> None:
    """Removes what runsc keeps of the box; one that hangs is killed with its cgroup."""
    if not is_gone:
        subprocess.run([*runsc, "kill", name, "KILL"], capture_output=True, timeout=30)
    if group is not None:
        group.kill()
        group.remove()
    subprocess.run([*runsc, "delete", "--force", name], capture_output=True, timeout=30)
    shutil.rmtree(bundle, ignore_errors=True)
