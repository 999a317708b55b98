"""Processes that use no arrays need no numpy to call each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from nanosched import Scheduler

class Own:
    def turned(self, items):
        return items[::-1], "numpy" in sys.modules

if __name__ == "__main__":
    with Scheduler(backend="local") as sched:
        own = sched.actor(Own).remote()
        print(sched.get(own.turned.remote([1, {"a": (2, b"x" * 100_000)}]))[1])
        print(sched.get(own.turned.remote([1, {"a": [2]}])), "numpy" in sys.modules)
"""


def test_nested_and_large_arguments_travel_where_numpy_was_never_imported(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.splitlines() == ["False", "([{'a': [2]}, 1], False) False"], run.stderr
