"""The walls: starts one worker (worker.py) inside bubblewrap, and says why where it cannot.

Nothing of the host is bound but /usr, what the interpreter loads and the loader's cache, read-only;
no network, no capabilities but the two that the server needs, in a user namespace in which no
further one can be made. Root is one path with a plain user: it becomes an unused uid first.
Left out: Landlock, containers and virtual machines as other tiers.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nanorl.sandbox import memory_limits as memory
from nanorl.sandbox import protocol, seccomp
from nanorl.sandbox.base import SandboxFailure, SandboxSpec
from nanorl.sandbox.execution import memory_file
from nanorl.sandbox.host_machine import reachable
from nanorl.sandbox.interpreter import Interpreter

_MAIN = """import sys
sys.path[0] = '/sbx'
from nanorl.sandbox.first import HeldHooks, enter_pid_namespace
enter_pid_namespace(int(sys.argv[1]))
hooks = HeldHooks()
from nanorl.sandbox.{} import main
main(hooks)
"""
_COMMANDS = "/sbx/bin"  # of a session: `python` and `python3` are the interpreter inside
# 60578-61183 is unused by Debian and systemd (systemd.io/UIDS-GIDS).
_FIRST_UID, _NUM_UIDS = 61000, 184
_WALLS = """
--unshare-user --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try
--as-pid-1 --disable-userns --die-with-parent --new-session --uid 1000 --gid 1000
--hostname sandbox --clearenv --setenv PATH /usr/bin:/bin --setenv HOME /tmp
--setenv LANG C.UTF-8 --setenv PYTHONHASHSEED 0 --setenv OMP_NUM_THREADS 1
--setenv PYTHONDONTWRITEBYTECODE 1
--cap-drop ALL --ro-bind /usr /usr
"""
_SERVERS_CAPABILITIES = "--cap-add CAP_SYS_ADMIN --cap-add CAP_SETPCAP"
# Not -I or -E: they ignore PYTHONHASHSEED, and workers would differ.
_END = "--remount-ro /dev --remount-ro / --"
_PYTHON_FLAGS = "-s -S -B"


def bwrap_arguments(
    python: Interpreter, data: Mapping[str, int], is_session: bool = False
) -> list[str]:
    """Everything after the executable's name, up to the program's arguments.

    `data`: paths inside, and the descriptors their read-only contents come from.
    """
    flags = [*wall_flags(), *_SERVERS_CAPABILITIES.split()]
    if is_session:
        for folder in (*protocol.FOLDERS, protocol.TESTS, protocol.LOGS):
            flags += ["--dir", folder]
        for name in ("python", "python3"):
            flags += ["--symlink", str(python.path), f"{_COMMANDS}/{name}"]
        flags += ["--setenv", "PATH", f"{_COMMANDS}:/usr/bin:/bin"]
    flags += python.bwrap_flags()
    flags += ["--tmpfs", "/tmp", "--dir", "/run", "--symlink", "/tmp", "/var/tmp"]
    for path_inside, descriptor in data.items():
        flags += ["--file", str(descriptor), path_inside]
    return [*flags, *_END.split(), str(python.path), *_PYTHON_FLAGS.split()]


def wall_flags() -> list[str]:
    """The walls, and inside of them the system's own folders, read-only, /proc and /dev."""
    flags = _WALLS.split()
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        root = Path("/", name)
        if root.is_symlink():
            flags += ["--symlink", os.readlink(root), f"/{name}"]
        elif root.is_dir():
            flags += ["--ro-bind", f"/{name}", f"/{name}"]
    for name in ("ld.so.cache", "alternatives", "localtime"):
        flags += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return [*flags, "--proc", "/proc", "--dev", "/dev"]


def unused_uid(index: int) -> int:
    """A user id for the `index`-th worker of this process; -1, which keeps its own, where it is not
    root's."""
    return _FIRST_UID + (os.getpid() * 8 + index) % _NUM_UIDS if os.geteuid() == 0 else -1


def worker_data() -> dict[str, bytes]:
    """The files that exist only inside, by path."""
    here = Path(__file__).parent
    modules = ["first", "worker", "confine", "program", "protocol", "usage", "keeper", "jobs"]
    modules += ["stream_frames", "plain", "tests_side", "program_side"]
    sources = {f"/sbx/nanorl/sandbox/{m}.py": (here / f"{m}.py").read_bytes() for m in modules}
    return {
        **sources,
        protocol.FILTER_PATH: seccomp.filter_bytes(platform.machine()),
        "/etc/passwd": b"sandbox:x:1000:1000::/tmp:/bin/sh\n",
    }


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
        "RLIMIT_SIGPENDING": 1024,  # timers count as well
    }


class BwrapWorker:
    """The process tree of one worker, and the control socket to the server inside it."""

    def __init__(
        self,
        spec: SandboxSpec,
        index: int,
        bwrap: Path,
        python: Interpreter,
        ablate: frozenset[str],
        is_session: bool = False,
    ) -> None:
        """Starts the worker and returns at once; `HELLO` arrives on `control` when it is warm.

        Must be called on a thread that lives as long as the worker: --die-with-parent means the
        parent thread (prctl(2), PR_SET_PDEATHSIG).
        """
        self.cgroup: memory.WorkerCgroup | None = None
        if "cgroup" not in ablate:
            self.cgroup = memory.create(spec.memory_bytes, spec.max_processes)
        self._messages = os.memfd_create("sandbox-messages", os.MFD_CLOEXEC)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "ablate": sorted(ablate),
            "preload": spec.preload,
            # Not its folder: programs write there, and this is the server's own path.
            "import_path": "/run" if is_session else "/tmp",
            "rlimits": rlimits(spec, self.cgroup is not None),
            "tmp_bytes": spec.tmp_bytes,
            "tmp_inodes": spec.tmp_inodes,
            "watch_bytes": 0 if "watcher" in ablate else spec.memory_bytes,
        }
        self._is_session = is_session
        try:
            self.control.send(json.dumps(config).encode())
            with reachable(bwrap) as executable:
                with theirs:
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
        self, executable: Path, python: Interpreter, index: int, theirs: socket.socket
    ) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            data = {path: memory_file("sandbox-data", c) for path, c in worker_data().items()}
            for descriptor in data.values():
                stack.callback(os.close, descriptor)
            uid = unused_uid(index)
            main = _MAIN.format("keeper" if self._is_session else "worker")
            procs = ":".join(self.cgroup.procs) if self.cgroup else "-"
            return subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(Path(__file__).with_name("launcher.py"))),
                    *(str(uid), procs, "--", str(executable)),
                    *bwrap_arguments(python, data, self._is_session),
                    *("-c", main, str(theirs.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._messages,
                stderr=self._messages,
                pass_fds=[*data.values(), theirs.fileno()],
                env={},
            )

    def _wait_until_loaded(self) -> None:
        """Wait until bubblewrap and its libraries are loaded: its first message, or its end."""
        self.control.settimeout(10)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            self.control.recv(64, socket.MSG_PEEK)
        self.control.settimeout(None)

    @property
    def memory_tier(self) -> str:
        return self.cgroup.name if self.cgroup else "watcher"

    @property
    def pid(self) -> int:
        """The process id of bubblewrap, in the host's numbering."""
        return self._process.pid

    def messages(self) -> str:
        """The complaints of bubblewrap and of the server."""
        return last_message(self._messages)

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


def last_message(descriptor: int) -> str:
    """The end of what a child process has written into the anonymous file of its complaints."""
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, 4096, max(0, size - 4096)).decode(errors="replace").strip()
