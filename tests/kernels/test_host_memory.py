"""reuse_large_buffers: a freed large tensor's memory serves the next one without page faults."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys, torch
from kernels.host_memory import reuse_large_buffers
if sys.argv[1] == "keep":
    assert reuse_large_buffers()
for i in range(22):
    if i == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
def test_freed_buffers_are_used_again():
    root = Path(__file__).parents[2]
    faults = {}
    for mode in ("keep", "return"):
        command = [sys.executable, "-c", PROGRAM, mode]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    if faults["return"] < 1000:
        pytest.skip("this kernel gives large pages or does not count faults")
    # Not 0: the allocator may split a kept chunk and take a new one a few times.
    assert faults["keep"] < faults["return"] / 4
