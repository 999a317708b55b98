"""The interpreter inside: which one it is, and the files of it that a program may see.

One under /usr comes with /usr. Of any other only the executable, the standard library and the
shared libraries that these load are bound, not its prefix, which may be /opt, a home folder, /.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from nanorl.sandbox.base import SandboxSpec, SandboxUnavailable
from nanorl.sandbox.host_machine import is_readable

# Loads what a program could load, and says what that was. Modules made for CPython's own tests and
# those that lack a library are of no use inside either.
_QUESTION = r"""
import importlib, json, os, sysconfig
folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
for folder in folders:
    dynamic = os.path.join(folder, "lib-dynload")
    for name in sorted(os.listdir(dynamic)) if os.path.isdir(dynamic) else ():
        if not name.startswith(("_test", "xx", "_xx")):
            try:
                importlib.import_module(name.partition(".")[0])
            except ImportError:
                pass
mapped = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if " /" in line}
print(json.dumps([sorted(folders), sorted(mapped)]))
"""
_LIMIT_S = 60


@dataclass(frozen=True)
class Interpreter:
    """`files`: files and folders outside of /usr to be bound where they are; `links`: symbolic
    links beside them, and what they lead to."""

    path: Path
    files: tuple[Path, ...] = ()
    links: tuple[tuple[Path, Path], ...] = ()

    def bwrap_flags(self) -> list[str]:
        flags = []
        for file in self.files:
            flags += ["--ro-bind", str(file), str(file)]
        for link, target in self.links:
            flags += ["--symlink", str(target), str(link)]
        return flags


def find_python(spec: SandboxSpec) -> Interpreter:
    """The interpreter, its links resolved; the uid that runs it must be able to read it."""
    wanted = [spec.python] if spec.python else ["/usr/bin/python3", sys.executable]
    for candidate in wanted:
        path = Path(candidate).resolve()
        if path.is_file() and is_readable(path):
            return _examine(path)
    if spec.python:
        raise ValueError(
            f"python={spec.python!r} does not exist or not every user can read it; give an "
            "interpreter outside of private folders such as /root"
        )
    raise SandboxUnavailable(
        f"no interpreter that the sandbox's user can read (tried {', '.join(map(str, wanted))})",
        "`apt install python3`, or set `python` to an interpreter outside of /root",
    )


def _examine(path: Path) -> Interpreter:
    if path.is_relative_to("/usr"):
        return Interpreter(path)
    command = [str(path), "-I", "-S", "-B", "-c", _QUESTION]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_LIMIT_S, env={})
        folders, mapped = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ValueError(
            f"python={str(path)!r} does not run on its own ({error}); give an interpreter that does"
        ) from error
    bound = [Path(folder) for folder in folders]
    system = [Path(p) for p in ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/dev", "/proc")]
    files = [f for f in map(Path, mapped) if not any(map(f.is_relative_to, [*system, *bound]))]
    links = [
        (link, target)
        for target in files
        for link in sorted(target.parent.iterdir())
        if link.is_symlink() and link.suffix != "" and link.resolve() == target
    ]
    return Interpreter(path, tuple([path, *(f for f in files if f != path), *bound]), tuple(links))
