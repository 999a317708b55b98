"""Where a model computes: what `--device` means, and how values cross to a GPU and back.

A copy between host and GPU costs some ten microseconds whatever its size, and one that the host
waits for costs the work that it could have queued meanwhile. So what one step needs goes up in one
copy from pinned memory (`to_device`), and what it gives comes down in one (`to_host`).

Left out: other accelerators than CUDA's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels.host_memory import release_free_memory

T = TypeVar("T")

_ALIGNMENT = 16  # bytes; Triton compiles a kernel again for pointers that are not aligned so


def resolve_device(name: str, *, local_rank: int = 0, num_local: int = 1) -> torch.device:
    """The device that `--device` names: auto (CUDA if there is any, else the CPU), cpu, cuda or
    cuda:N. Of `num_local` processes on this machine each takes the GPU of its own rank.

    `ValueError` where there is no such device.
    """
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ValueError(f"--device {name}: must be auto, cpu, cuda or cuda:N")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "sees no GPU" if torch.version.cuda else "was built without CUDA"
        raise ValueError(
            f"--device {name}: there is no CUDA device, this PyTorch {built}; use --device cpu, or "
            "auto, which takes a GPU where there is one"
        )
    if index and num_local > 1:
        raise ValueError(
            f"--device {name}: {num_local} processes cannot share one GPU; use --device cuda, "
            "which gives each its own"
        )
    wanted, num_gpus = int(index) if index else local_rank, torch.cuda.device_count()
    if max(wanted, num_local - 1) >= num_gpus:
        asked = f"GPU {wanted}" if num_local == 1 else f"{num_local} processes, a GPU each"
        raise ValueError(
            f"--device {name}: {asked}, but this machine has {num_gpus}, counted from 0; choose "
            "one of them, or --device cpu"
        )
    return torch.device("cuda", wanted)


def enter_device(device: torch.device, num_threads: int | None = None) -> None:
    """For the first line of a thread: kernels are launched on the thread's own current GPU, and a
    new thread's is the first one. `num_threads` is of its torch operations on the CPU."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def worker_thread(name: str, device: torch.device, num_threads: int) -> ThreadPoolExecutor:
    """An executor of one thread that works on `device`."""
    return ThreadPoolExecutor(1, name, enter_device, (device, num_threads))


def release_memory() -> None:
    """Gives back what was freed on host and GPU, after a phase that needed more than the next one
    will: both keep it for themselves otherwise."""
    release_free_memory()
    torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody has, what PyTorch keeps for itself unused included."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def to_device(value: T, device: torch.device) -> T:
    """`value`, a dataclass, with all its tensors (in dataclasses and dictionaries in it, too) on
    `device`. A GPU gets them in one copy from pinned memory, not waited for."""
    if device.type == "cpu":
        return value
    moved: T = _rebuilt(value, iter(_upload(list(_tensors(value)), device)))
    return moved


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in _parts(value):
            yield from _tensors(part)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def _rebuilt(value: Any, moved: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(moved)
    parts = [_rebuilt(part, moved) for part in _parts(value)]
    if not parts:
        return value
    if isinstance(value, dict):
        return dict(zip(value, parts, strict=True))
    names = [field.name for field in fields(value)]
    return replace(value, **dict(zip(names, parts, strict=True)))


def _upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Pinned memory comes from PyTorch's cache of it, which waits for the copy before it hands the
    same bytes out again."""
    starts, size = [], 0
    for x in tensors:
        starts.append(size)
        size += -(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for x, start in zip(tensors, starts, strict=True):
        _piece(host, start, x).copy_(x)
    packed = host.to(device, non_blocking=True)
    return [_piece(packed, start, x) for x, start in zip(tensors, starts, strict=True)]


def _piece(packed: Tensor, start: int, like: Tensor) -> Tensor:
    end = start + like.numel() * like.element_size()
    return packed[start:end].view(like.dtype).view(like.shape)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' values on the CPU, in one copy that the host waits for. They may be of any
    dtypes whose values fp64 holds (of int64 those below 2^53)."""
    if all(x.device.type == "cpu" for x in tensors):
        return list(tensors)
    packed = torch.cat([x.detach().reshape(-1).to(torch.float64) for x in tensors]).cpu()
    parts = packed.split([x.numel() for x in tensors])
    return [part.to(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True)]
