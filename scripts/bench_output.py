"""What every benchmark writes: one JSON with date, hardware, commit, command and rows."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("name", "dtype", "threads", "value", "unit", "peer", "peer_value", "ratio", "bound")


def hardware() -> str:
    """The CPU's name and core count, or the machine type where the kernel does not tell."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    num_cores = len(os.sched_getaffinity(0))
    return f"{name}, {num_cores} core{'s' if num_cores > 1 else ''}"


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def write_json(
    path: Path, rows: Sequence[dict[str, Any]], *, about: Mapping[str, Any] | None = None
) -> None:
    """Write rows under the common head; `about` is what else holds for all of them."""
    script, *arguments = sys.argv
    head = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "commit": commit(),
        "command": " ".join([Path(script).name, *arguments]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, **(about or {}), "rows": list(rows)}, indent=1) + "\n")


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table."""

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    table = [COLUMNS, *([cell(row.get(c)) for c in COLUMNS] for row in rows)]
    widths = [max(len(str(line[i])) for line in table) for i in range(len(COLUMNS))]
    for line in table:
        print("  ".join(str(v).ljust(w) for v, w in zip(line, widths, strict=True)))
