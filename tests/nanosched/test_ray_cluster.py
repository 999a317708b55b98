"""Two machines of a Ray cluster, as far as one machine can play them; one of them is lost.

The program is a process of its own: a process has one connection to Ray, which other tests use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

PROGRAM = Path(__file__).with_name("ray_cluster_program.py")


@pytest.mark.xdist_group("ray")
def test_a_lost_machine_takes_its_actors_and_no_others() -> None:
    pytest.importorskip("ray", reason="ray is not installed (pip install .[ray])")
    environment = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64}
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(  # pytest's own folders have too long names for a socket
            [sys.executable, str(PROGRAM), folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    machines = "(num_cpus=2, num_gpus=0) and (num_cpus=2, num_gpus=0)"
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "available": [4, 0],
        "never": f"(num_cpus=3, num_gpus=0) can never be had: the cluster has {machines}",
        "never together": f"(num_cpus=4, num_gpus=0), (num_cpus=4, num_gpus=0) can never be had: "
        f"the cluster has {machines}",
        "sleeping": "died",
        "later": "died",
        "result": "died",  # it was on the lost machine only
        "death": True,
        "others": ["1000000.0", True],
        "connected": True,
        "disconnected": True,
    }
