"""These files run in a process of their own, with TRITON_INTERPRET=1 (see ../test_interpreter.py):
Triton reads the switch when a kernel is decorated, and the repair below is for the whole process."""

import os
import sys
from pathlib import Path

assert os.environ.get("TRITON_INTERPRET") == "1", (
    "run these through tests/kernels/test_interpreter.py"
)
sys.path.insert(0, str(Path(__file__).parent))

import interp_shim

interp_shim.install()
