"""What every process of a run can say of itself, whatever its role. Left out: its GPU's memory."""

from __future__ import annotations

import os
import socket
from typing import Any


def vitals() -> dict[str, Any]:
    """The id of this process, its machine and its memory in bytes: part of a heartbeat."""
    pid = os.getpid()
    return {"pid": float(pid), "host": socket.gethostname(), "rss_bytes": rss_bytes(pid) or 0.0}


def rss_bytes(pid: int) -> float | None:
    """Memory that a process of this machine has now; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return None
