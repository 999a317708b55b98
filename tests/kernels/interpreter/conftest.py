"""These files run in a process of their own, with TRITON_INTERPRET=1 (../test_interpreter.py):
Triton reads the switch when a kernel is decorated, and the repair is for the whole process."""

import os
import sys
from importlib import import_module
from pathlib import Path

if os.environ.get("TRITON_INTERPRET") == "1":
    sys.path.insert(0, str(Path(__file__).parent))
    import_module("shim").install()
else:
    collect_ignore_glob = ["*"]
