"""`RecordingProxy`: the recording proxy of a run, in a process of its own.

    with RecordingProxy(config.http, store=run_dir / "http.sqlite") as proxy:
        environment = proxy.access.environment()     # for whoever is to use it
        proxy.take_counts()                          # {"recorded": 3, "replayed": 1}

A process, because code that blocks the run's own event loop would wait for an answer that only that
loop could give. Next: answers.py (what a request is answered with), record_server.py (the
protocol), record.py (the file), record_access.py (how code gets there).
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoengine.extras import missing
from nanorl.envs.http_record.record_access import HttpAccess
from nanorl.envs.http_record.record_config import HttpConfig

_ROOT = Path(__file__).resolve().parents[3]
_NEEDS = ("cryptography", "h11")
_END_S = 10.0


class RecordingProxy:
    """Starts it; `close` ends it. It ends by itself when this process does."""

    def __init__(self, config: HttpConfig, *, store: Path) -> None:
        """`store` is the file of the record. ValueError where the record cannot be read, or a
        package is missing."""
        for name in _NEEDS:
            if importlib.util.find_spec(name) is None:
                raise missing(f"--http.mode {config.mode}", name, extra="http")
        self._folder = Path(tempfile.mkdtemp(prefix="nanorl-http-"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nanorl.envs.http_record.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": _search_path()},
            text=True,
            start_new_session=True,  # Ctrl-C is the run's: it saves first
        )
        token = secrets.token_urlsafe(24)
        try:
            order = {"config": asdict(config), "store": str(store.absolute()), "token": token}
            told = self._ask(json.dumps(order, default=str))
            if "error" in told:
                raise ValueError(told["error"])
        except BaseException:  # Ctrl-C too: the process runs already
            self.close()
            raise
        ca_file = self._folder / "ca.pem"
        ca_file.write_text(told["pem"])
        self.access = HttpAccess(port=told["port"], token=token, ca_file=ca_file)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def take_counts(self) -> dict[str, int]:
        """Count how often each thing happened since the last call. ConnectionError if the proxy
        died."""
        return self._ask("")

    def close(self) -> None:
        """End it, what it has recorded being on the disk. Closing twice is fine."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # it may have died
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RecordingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, line: str) -> dict[str, Any]:
        """The process's answer to a line."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both were asked for"
        try:
            stdin.write(line + "\n")
            stdin.flush()
            answer: dict[str, Any] = json.loads(stdout.readline())
        except (OSError, ValueError) as error:
            raise ConnectionError(
                f"the recording proxy, process {self.pid}, has died; what it recorded is on the "
                "disk, and --resume goes on with it"
            ) from error
        return answer


def _search_path() -> str:
    """The PYTHONPATH by which the process finds this package, wherever the run was started."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(_ROOT), *([given] if given else [])])
