"""`oci`: a container of podman or docker for every program, without a network, rights or a disk.

One list of arguments serves both command lines. The image holds a Python and is never pulled; a
program sees it read-only. The guest is the init of the container, under another user than root, and
adds the system-call filter for the program; the profile that the engine itself enforces comes from
the same table (seccomp.py), since docker's own lets io_uring and vsock through.
A container that hangs is killed by the engine, and one whose host died ends by itself: its standard
input closes. Left out: a registry, networks, volumes, another user namespace for root's podman.
"""

from __future__ import annotations

import base64
import errno
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

from nanorl.sandbox import protocol, seccomp
from nanorl.sandbox.backends.box import ENVIRONMENT, PYTHON_FLAGS, Launch, guest_config
from nanorl.sandbox.base import MIB, SandboxSpec, SandboxUnavailable
from nanorl.sandbox.bwrap import rlimits
from nanorl.sandbox.canary import CODE, walls_without

IMAGE = "nanorl-sandbox"
_PREFIX = "nanorl-sandbox-"
_REMEDY_IMAGE = "make the image: `bash scripts/make_sandbox_image.sh podman` (or docker)"
_REMEDY_ENGINE = "install podman (`apt install podman runc`), or start the docker daemon"
# What the server needs beside the program, as with bubblewrap (memory.py).
_OVERHEAD_BYTES, _OVERHEAD_PROCESSES = 48 * MIB, 8
# Of the user id in all containers together; engines ask for more than some hosts let them have.
_USERS_PROCESSES = 4096
_WALLS = """
run --rm -i --pull=never --network none --ipc private --read-only --cap-drop ALL
--security-opt no-new-privileges --user 1000:1000 --hostname sandbox --workdir / --shm-size 16m
--log-driver none
"""
_LIMIT_S = 60
# For the engine's own start of the process, before its first instruction.
_STARTERS = "setuid setgid setgroups setresuid setresgid setfsuid setfsgid capset seccomp chroot"
_NAMESPACE_FLAGS = 0x7E020000
_OOM_FILES = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")


class OciBackend:
    """Starts guests in containers."""

    tier = "oci"
    runs_per_box = 1
    start_limit_s = 60.0
    question = CODE
    refused_jobs: Mapping[int, str] = {}

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.image = spec.image or IMAGE
        self.engine = find_engine(spec, self.image)
        self.memory = "cgroup"
        self.details = {"engine": self.engine, "image": self.image}
        self._folder = tempfile.TemporaryDirectory(prefix="nanorl-oci-")
        self._profile = Path(self._folder.name, "seccomp.json")
        self._profile.write_text(json.dumps(seccomp_profile(platform.machine())))
        _sweep(self.engine)

    @property
    def promises(self) -> Mapping[str, Any]:
        """All of bubblewrap's, but for the numbers of processes and what the image holds."""
        return {
            **walls_without("processes", "host's folders", "capabilities"),
            "held capabilities": 0,
            "host's file": False,
            "strangers": [],
            "files in /tmp": [protocol.PROGRAM_NAME],
            "internet socket": (errno.EAFNOSUPPORT, errno.EPERM),
            "core dumps": 0,
        }

    def launch(self, index: int) -> Launch:
        name = f"{_PREFIX}{os.getpid()}-{os.urandom(6).hex()}"
        return Launch(
            argv=run_arguments(self.engine, self.spec, self.image, name, self._profile),
            environment=dict(os.environ),  # the engine's; the container has its own
            folder=self._folder.name,  # podman's monitor leaves a file `oom` where it was started
            config=guest_config(
                self.spec,
                rlimits=_rlimits(self.spec),
                filter=base64.b64encode(seccomp.filter_bytes(platform.machine())).decode(),
                oom_files=_OOM_FILES,
            ),
            kill=partial(_run_detached, [self.engine, "kill", name]),
            end=partial(_remove, self.engine, name),
            leave_s=5.0,
        )

    def explain(self, messages: str) -> SandboxUnavailable:
        return SandboxUnavailable(f"--sandbox oci: {messages}", _REMEDY_ENGINE)

    def close(self) -> None:
        self._folder.cleanup()


def find_engine(spec: SandboxSpec, image: str) -> str:
    """The first engine that has the image. SandboxUnavailable says what each of them answered."""
    wanted = [spec.engine] if spec.engine else ["podman", "docker"]
    answers, remedy = [], _REMEDY_ENGINE
    for name in wanted:
        path = shutil.which(name)
        if path is None:
            answers.append(f"{name} is not installed")
            continue
        done = _run([path, "image", "inspect", image])
        if done is not None and done.returncode == 0:
            return path
        said = "it does not answer" if done is None else done.stderr.strip().splitlines()[-1:]
        answers.append(f"{name}: {''.join(said)}")
        if done is not None and "connect" not in done.stderr:
            remedy = _REMEDY_IMAGE
    raise SandboxUnavailable(f"--sandbox oci: no image {image!r} ({'; '.join(answers)})", remedy)


def run_arguments(
    engine: str, spec: SandboxSpec, image: str, name: str, profile: Path
) -> list[str]:
    """The command line of one container, for podman and docker alike."""
    is_podman = Path(engine).name.startswith("podman")
    most = f"{spec.memory_bytes + _OVERHEAD_BYTES}"
    size = f"rw,exec,nosuid,nodev,size={spec.tmp_bytes},mode=1777"
    if not is_podman:  # podman's does not know it
        size += f",nr_inodes={spec.tmp_inodes}"
    argv = [engine, *(_podman_flags() if is_podman else [])]
    argv += _WALLS.split()
    argv += ["--security-opt", f"seccomp={profile}", "--memory", most, "--memory-swap", most]
    argv += ["--pids-limit", str(spec.max_processes + _OVERHEAD_PROCESSES), "--name", name]
    for path in ("/tmp", *protocol.FOLDERS, protocol.TESTS, protocol.LOGS):
        argv += ["--tmpfs", f"{path}:{size}"]
    files = spec.max_open_files
    argv += ["--ulimit", f"nofile={files}:{files}", "--ulimit", "core=0:0"]
    argv += ["--ulimit", "memlock=65536:65536", "--ulimit", "msgqueue=0:0"]
    argv += ["--ulimit", f"nproc={_USERS_PROCESSES}:{_USERS_PROCESSES}"]
    for variable, value in ENVIRONMENT.items():
        argv += ["--env", f"{variable}={value}"]
    return [*argv, image, "python3", *PYTHON_FLAGS]


def seccomp_profile(machine: str) -> dict[str, Any]:
    """seccomp.py's table as an engine takes it; arguments are left to the program's own filter,
    but for those that make namespaces and other sockets than unix ones."""
    allowed = seccomp.syscall_numbers(seccomp.ALLOWED, machine)
    checked = seccomp.syscall_numbers(seccomp.CHECKED, machine)
    special = {"clone", "clone3", "socket", "socketpair"}
    names = [*allowed, *(name for name in checked if name not in special), *_STARTERS.split()]
    flags = {"index": 0, "value": _NAMESPACE_FLAGS, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    is_unix = {"index": 0, "value": 1, "op": "SCMP_CMP_EQ"}
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": [f"SCMP_ARCH_{machine.upper()}"],
        "syscalls": [
            {"names": names, "action": "SCMP_ACT_ALLOW"},
            {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [flags]},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
            {"names": ["socket", "socketpair"], "action": "SCMP_ACT_ALLOW", "args": [is_unix]},
        ],
    }


def _podman_flags() -> list[str]:
    """The flags that podman needs where there is no systemd, or the cgroups are of version 1."""
    flags = []
    if not os.path.exists("/run/systemd/system"):
        flags += ["--cgroup-manager", "cgroupfs"]
    if not os.path.exists("/sys/fs/cgroup/cgroup.controllers"):  # crun refuses such a machine
        flags += ["--runtime", "runc"]
    return flags


def _rlimits(spec: SandboxSpec) -> dict[str, int]:
    """Without the number of processes, which the kernel counts over all containers of a user: the
    engine's pids limit bounds it."""
    limits = rlimits(spec, has_cgroup=True)
    del limits["RLIMIT_NPROC"]
    return limits


def _run(argv: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _run_detached(argv: list[str]) -> None:
    """Starts a command and lets it be."""
    null = subprocess.DEVNULL
    # A child of init: nobody here has to wait for it.
    subprocess.run(["/bin/sh", "-c", '"$@" &', "sh", *argv], stdin=null, stdout=null, stderr=null)


def _remove(engine: str, name: str, is_gone: bool) -> None:
    if not is_gone:
        _run([engine, "rm", "--force", name])


def _sweep(engine: str) -> None:
    """Removes containers of processes that were killed."""
    done = _run([engine, "ps", "--all", "--format", "{{.Names}}", "--filter", f"name={_PREFIX}"])
    for name in done.stdout.split() if done else []:
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _run([engine, "rm", "--force", name])
