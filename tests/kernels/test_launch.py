"""Every Triton kernel starts on the GPU that holds its tensors, whichever is current: a launch on
another one reads addresses that mean nothing there, and a new thread's current GPU is the first.

No GPU is needed: wrappers run on fake tensors of `cuda:1`, and a stand-in for Triton's launch notes
the device that is current.
"""

import ast
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton exists on Linux only")
from triton.runtime.jit import KernelInterface

from kernels import apply_rope, flash_attn_varlen, rms_norm, swiglu
from kernels.triton.launch import launch

KERNELS = Path(__file__).parents[2] / "kernels"


class Driver:
    """The current device of a thread, which is the first GPU until somebody sets it."""

    def __init__(self):
        self.local = threading.local()
        self.launches = []

    def current(self):
        return getattr(self.local, "index", 0)

    @contextmanager
    def device(self, device):
        before, self.local.index = self.current(), torch.device(device).index
        yield
        self.local.index = before

    def start(self, kernel):
        return lambda *args, **options: self.launches.append((kernel.__name__, self.current()))


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: made.start(kernel))
    monkeypatch.setattr(torch.cuda, "device", made.device)
    return made


@torch.no_grad()
def run_some_kernels():
    with FakeTensorMode(), torch.device("cuda:1"):
        q, k, cu = torch.empty(5, 4, 16), torch.empty(5, 2, 16), torch.empty(3, dtype=torch.int32)
        table = torch.empty(5, 8)
        rms_norm(torch.empty(5, 8), torch.empty(8))
        swiglu(torch.empty(5, 8))
        apply_rope(q, k, table, table, None)
        flash_attn_varlen(q, k, k, cu, cu, 3, 3)


def test_kernels_start_on_the_gpu_of_their_tensors_and_leave_the_current_one(driver):
    run_some_kernels()
    assert {gpu for _, gpu in driver.launches} == {1} and len(driver.launches) == 4
    assert driver.current() == 0


def test_kernels_of_a_new_thread_start_on_the_gpu_of_their_tensors(driver):
    with driver.device("cuda:1"):
        thread = threading.Thread(target=run_some_kernels)
        thread.start()
        thread.join()
    assert {gpu for _, gpu in driver.launches} == {1} and len(driver.launches) == 4


def test_the_device_is_that_of_the_first_tensor_and_a_cpu_has_none(driver):
    with FakeTensorMode():
        on_second = torch.empty(2, device="cuda:1")
    from kernels.triton.swiglu import swiglu_forward_kernel as kernel

    launch(kernel, (1,))(None, 3, on_second, BLOCK=4)
    launch(kernel, (1,))(torch.empty(2), BLOCK=4)
    assert [gpu for _, gpu in driver.launches] == [1, 0]


def test_no_kernel_is_started_past_launch():
    """Triton's own `kernel[grid](...)` stands in `triton/launch.py` alone."""
    found = [
        f"{path.relative_to(KERNELS)}:{node.lineno}"
        for path in sorted(KERNELS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    assert len(found) == 1 and found[0].startswith("triton/launch.py")
