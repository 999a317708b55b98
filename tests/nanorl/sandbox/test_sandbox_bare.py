"""What boxes, grades and records needs nothing but the standard library: the hostile suite runs it
as a plain user, who has no other packages (scripts/test_hostile.sh)."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "module",
    [
        "nanorl.sandbox",
        "nanorl.sandbox.grading",
        "nanorl.sandbox.agent_box",
        "nanorl.agents.agent_program",
        "nanorl.types",
    ],
)
def test_it_imports_where_no_packages_are(module: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {module}"
    # -S leaves out site-packages, -I what the environment adds.
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
