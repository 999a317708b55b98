"""`--device` means what it says, and values cross to a GPU and back whole."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.memory import to_device, to_host
from nanoengine.parallel.device import resolve_device

ROOT = Path(__file__).resolve().parents[3]


def machine(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 0)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    machine(monkeypatch, 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("cpu") == torch.device("cpu")


def test_each_process_takes_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2)
    for name in ("auto", "cuda"):
        assert resolve_device(name, local_rank=1, num_local=2) == torch.device("cuda:1")
    assert resolve_device("cpu", local_rank=3, num_local=4) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"--device cuda: 4 processes.*2, counted.*--device cpu"):
        resolve_device("cuda", local_rank=0, num_local=4)
    with pytest.raises(ValueError, match=r"--device cuda:1: 2 processes cannot share one GPU"):
        resolve_device("cuda:1", num_local=2)


@pytest.mark.parametrize(
    ("name", "num_gpus", "message"),
    [
        ("cuda", 0, r"--device cuda: there is no CUDA device.*--device cpu, or auto"),
        ("cuda:0", 0, r"--device cuda:0: there is no CUDA device"),
        ("cuda:2", 2, r"--device cuda:2: GPU 2, but this machine has 2"),
        ("gpu", 1, r"--device gpu: must be auto, cpu, cuda or cuda:N"),
        ("cuda:-1", 1, r"--device cuda:-1: must be"),
        ("cpu:0", 1, r"--device cpu:0: must be"),
        ("", 1, r"--device : must be"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, num_gpus: int, message: str
) -> None:
    machine(monkeypatch, num_gpus)
    with pytest.raises(ValueError, match=message):
        resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "command",
    [
        ["scripts/train_agent.py", "--preset", "tiny", "--out"],
        ["scripts/train_sft.py", "--data", "README.md", "--out"],
        ["-m", "nanoinfer.server", "--model"],
    ],
    ids=["train_agent", "train_sft", "server"],
)
def test_a_command_without_its_gpu_says_so_and_leaves_nothing(
    command: list[str], tmp_path: Path
) -> None:
    place = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, *command, str(place), "--device", "cuda"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert "--device cuda: there is no CUDA device" in done.stderr, done.stderr
    assert not place.exists()


@dataclass(frozen=True)
class Inner:
    table: Tensor
    name: str


@dataclass(frozen=True)
class Outer:
    ids: Tensor
    fields: dict[str, Tensor]
    inner: Inner
    missing: Tensor | None
    lengths: list[int]


def an_outer() -> Outer:
    fields = {"a": torch.tensor([True, False, True]), "b": torch.randn(2, 3)}
    inner = Inner(torch.arange(6, dtype=torch.int32).view(2, 3).T, "x")
    return Outer(torch.tensor([3, 1]), fields, inner, None, [1, 2])


def test_a_cpu_gets_the_very_tensors() -> None:
    value = an_outer()
    assert to_device(value, torch.device("cpu")) is value
    tensors = [value.ids, value.inner.table]
    assert all(a is b for a, b in zip(to_host(tensors), tensors, strict=True))


def test_packed_pieces_have_their_shapes_values_and_alignment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device of this machine that is no CPU to `to_device`: the copy is a real one."""
    from kernels.gpu import upload as module

    host = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **options: host(*size, **options)
    )
    value = an_outer()
    tensors = list(module._tensors(value))
    moved = module._upload(tensors, torch.device("cpu"))
    for x, y in zip(tensors, moved, strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype and y.is_contiguous()
        assert y.storage_offset() * y.element_size() % 16 == 0
    assert len({y.untyped_storage().data_ptr() for y in moved}) == 1


def test_a_gpu_gets_all_in_one_copy_and_gives_all_in_one() -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from fake_cuda import fake_gpu

    with fake_gpu() as gpu:
        value = to_device(an_outer(), torch.device("cuda:0"))
        (up,) = gpu.take()
        assert up.kind == "upload" and up.is_async
        assert value.fields["b"].device == value.inner.table.device == torch.device("cuda:0")
        assert value.inner.name == "x" and value.missing is None and value.lengths == [1, 2]
        found = to_host([value.ids, value.fields["b"]])
        assert [copy.kind for copy in gpu.take()] == ["download"]
    assert [x.dtype for x in found] == [torch.int64, torch.float32]
    assert [x.shape for x in found] == [(2,), (2, 3)]
