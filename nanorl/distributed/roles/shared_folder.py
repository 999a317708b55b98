"""Says on which machine of a cluster a folder is missing that all of them need. Left out: copying
folders to machines (a shared file system does)."""

from __future__ import annotations

import socket
from pathlib import Path


def require_folder(folder: Path) -> None:
    """`ValueError` in the process of a role that does not find `folder`, which the driver has."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder on {socket.gethostname()}: each machine of a cluster reads "
            "it at the same path; put --cache-dir, --model and --out on a file system that all of "
            "them share"
        )
