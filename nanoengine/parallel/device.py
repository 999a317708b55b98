"""Where a model computes: what `--device` means. How values get there: kernels/memory.py.

Left out: other accelerators than CUDA's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from kernels.torch.allocator import reuse_large_buffers


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


def enter_process(device: torch.device, num_threads: int) -> None:
    """`enter_device` for a process that one engine has for itself, and which does nothing else: it
    keeps large host buffers, whose pages would be taken and given back in every step."""
    reuse_large_buffers()
    enter_device(device, num_threads)


def worker_thread(name: str, device: torch.device, num_threads: int) -> ThreadPoolExecutor:
    """An executor of one thread that works on `device`."""
    return ThreadPoolExecutor(1, name, enter_device, (device, num_threads))


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody has, what PyTorch keeps for itself unused included."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
