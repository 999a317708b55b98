"""A run of one process loads nothing that only runs of several need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
from nanorl.options.parts import Parts
from nanorl.options.presets import get_preset
from nanorl.observability.report.live import LiveView
from nanorl.distributed.roles.choose_roles import make_roles
from nanorl.run.run import Run

config = replace(get_preset("tiny").config(), out=Path(sys.argv[1]), threads=1)
parts = Parts(config)
roles = make_roles(parts)
try:
    Run(parts, roles, LiveView("a run"))
finally:
    roles.close()
print(*sorted(sys.modules))
"""
OF_SEVERAL = {
    *("ray", "nanosched.local", "nanosched.ray_backend", "nanorl.distributed.roles.cluster"),
    *("uvicorn", "prometheus_client", "apprise"),
}


def test_an_inline_run_loads_no_ray_and_no_other_back_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "nanorl.distributed.roles.inline_roles" in loaded
    assert not loaded & OF_SEVERAL
