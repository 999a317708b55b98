"""monitor.json in the run's folder: where its monitor listens, and the token of its verbs.

It is written when the server listens, with mode 0600, and removed when the run ends. After
`kill -9` it stays and leads nowhere, until the run is resumed. Whoever can read the folder as its
owner can watch and control the run, and nobody else can.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "monitor.json"


@dataclass(frozen=True, kw_only=True)
class MonitorAccess:
    """Says how to reach the monitor of one run."""

    url: str  # http://127.0.0.1:40123
    token: str
    pid: int  # of the driver

    def write(self, run_dir: Path) -> None:
        """Replace the file in one piece, readable for its owner alone from its first byte."""
        temporary = run_dir / f".{FILE_NAME}.{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        # The mode counts at creation only: a file that exists would keep its own.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        os.replace(temporary, run_dir / FILE_NAME)

    @classmethod
    def read(cls, run_dir: Path) -> MonitorAccess:
        """`ValueError` where no run with a monitor is going on."""
        file = run_dir / FILE_NAME
        try:
            return cls(**json.loads(file.read_text("utf-8")))
        except FileNotFoundError:
            raise ValueError(
                f"{file} does not exist: no run with a monitor goes on in this folder; name its "
                "folder with --run, and start it with --monitor.port 0"
            ) from None
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file} is damaged ({error}); the run writes it at its start"
            ) from None

    def remove(self, run_dir: Path) -> None:
        """Take the file away, unless another run has replaced it since."""
        try:
            is_ours = MonitorAccess.read(run_dir) == self
        except ValueError:  # it is gone, or is not what anybody wrote
            return
        if is_ours:
            (run_dir / FILE_NAME).unlink()
