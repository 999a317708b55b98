"""Runs the Triton kernels through Triton's interpreter, each file in its own process: the switch
must be set before Triton is imported and would change every other test of this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


CHECKS = sorted(path.name for path in (HERE / "interpreter").glob("check_*.py"))


@pytest.mark.rare
@pytest.mark.parametrize("name", CHECKS)
def test_triton_kernels_are_right_in_the_interpreter(name):
    command = [sys.executable, "-m", "pytest", str(HERE / "interpreter" / name)]
    command += ["-q", "-x", "-p", "no:cacheprovider"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_cpu_path_does_not_import_triton():
    program = (
        "import sys, torch, kernels as k; x = torch.ones(2, 4, requires_grad=True);"
        "k.swiglu(k.rms_norm(x, torch.ones(4))).sum().backward();"
        "assert not any(m.split('.')[0] == 'triton' for m in sys.modules), 'triton imported'"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
