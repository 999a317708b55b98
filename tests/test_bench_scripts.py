"""Every benchmark starts in a process of its own, as `bench.sh` starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
BENCHES = sorted(SCRIPTS.glob("bench_*.py"))


@pytest.mark.parametrize("bench", BENCHES, ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports(bench: Path) -> None:
    """An import that needs peers/ on the path and stands before it is found by no linter."""
    program = f"import runpy; runpy.run_path({str(bench)!r}, run_name='imported')"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); {program}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
