"""A run whose trainer has a rank on each of two machines of a Ray cluster, as far as one machine
can play them.

It is slow because it starts a Ray cluster; its program is a process of its own, because a process
has one connection to Ray.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from forked_runs import SMALL, RunProcess
from run_outcomes import differences

PROGRAM = Path(__file__).with_name("ray_machines_program.py")
LAYOUT = ("--learner.dp", "2")
RAY = ("--cluster.backend", "ray", "--cluster.transport", "dist")

pytestmark = [pytest.mark.slow, pytest.mark.sandbox, pytest.mark.xdist_group("ray")]


def test_a_trainer_over_two_machines_ends_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed (pip install .[ray])")
    local, far = tmp_path / "local", tmp_path / "ray"
    here = RunProcess(
        tmp_path / "log", *(*SMALL, *LAYOUT, "--cluster.backend", "local", "--out", str(local))
    )
    assert here.wait() == 0, here.output()
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(  # pytest's own folders have too long names for a socket
            [sys.executable, str(PROGRAM), folder, *SMALL, *LAYOUT, *RAY, "--out", str(far)],
            env={**os.environ, "RAY_AUTH_TOKEN": "0" * 64},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"status": 0, "machines": [1, 2]}
    assert differences(far, local) == []
