"""A PostgreSQL server of its own for tests and benchmarks: a temporary folder, a Unix socket, no
port. Debian's package (postgresql) or any other installation in the PATH will do."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

DEBIAN = Path("/usr/lib/postgresql")
USER = "postgres"


def find_programs() -> Path | None:
    """The folder of initdb and pg_ctl, the newest version's; None where there is none."""
    found = shutil.which("pg_ctl")
    if found is not None:
        return Path(found).parent
    folders = [path.parent for path in DEBIAN.glob("*/bin/pg_ctl")]
    return max(folders, key=lambda path: int(path.parent.name), default=None)


def why_not() -> str:
    """Why no server can be started here; empty where one can."""
    if find_programs() is None:
        return "PostgreSQL is not installed: bash scripts/install_test_tools.sh"
    if os.geteuid() == 0 and USER not in [one.pw_name for one in pwd.getpwall()]:
        return f"PostgreSQL does not run as root, and there is no user {USER}"
    return ""


class PostgresServer:
    """Runs between `with` and its end; `address` is that of its database, `stop` and `start` do so
    in between."""

    def __init__(self, parent: Path | None = None) -> None:
        programs = find_programs()
        assert programs is not None, why_not()
        self._programs = programs
        self._user = USER if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="pg-", dir=parent))  # a short path: sockets
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self.address = f"postgresql:///postgres?host={self._folder}&user={USER}"

    def __enter__(self) -> PostgresServer:
        data = str(self._folder / "data")
        self._do("initdb", "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync")
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def start(self) -> None:
        """Returns when it answers."""
        options = f"-c listen_addresses='' -k {self._folder}"
        log = str(self._folder / "log")
        self._control("start", "-w", "-l", log, "-o", options)

    def stop(self, mode: str = "immediate") -> None:
        """`immediate` is as good as kill -9: the server recovers from its log at the next start."""
        self._control("stop", "-w", "-m", mode)

    def _control(self, *words: str) -> None:
        self._do("pg_ctl", "-D", str(self._folder / "data"), *words)

    def _do(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [str(self._programs / program), *words],
            user=self._user,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the server inherits it: a pipe would never end
            stderr=subprocess.DEVNULL,
        )
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(words)} ended with {done.returncode}")
