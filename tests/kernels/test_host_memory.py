"""reuse_large_buffers: the memory of a freed large tensor stays with the process until released."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch
from kernels.memory import release_free_memory
from kernels.torch.allocator import reuse_large_buffers
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
if sys.argv[1] == "keep":
    assert reuse_large_buffers()
torch.ones(1 << 10)
before = resident()
tensor = torch.ones(16 << 20)
held = resident() - before
del tensor
freed = resident() - before
release_free_memory()
print(held, freed, resident() - before)
"""
SIZE = 64 << 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
@pytest.mark.parametrize("mode", ["keep", "return"])
def test_freed_buffers_stay_with_the_process_until_released(mode: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM, mode]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    held, freed, released = map(int, done.stdout.split())
    assert held > 0.9 * SIZE
    assert (freed > 0.9 * SIZE) == (mode == "keep")
    assert released < 0.1 * SIZE
