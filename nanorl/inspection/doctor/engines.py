"""PyTorch and the C++ kernels of this machine, looked at in a process of their own.

    python -m nanorl.inspection.doctor.engines        # prints JSON

A PyTorch that does not import, or that this processor cannot run, ends that process alone, and the
examination goes on. The first call compiles the kernels, as the first run would.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import warnings
from typing import Any

_COMPILERS = ("g++", "clang++", "c++")  # in the order of kernels/cpp/build.py
_VERSION_LIMIT_S = 30


def examine_engines() -> dict[str, Any]:
    """Say which PyTorch this is, which GPUs it reaches, and which path multiplies in each dtype."""
    import torch  # here: OMP_NUM_THREADS is set before

    cuda = torch.version.cuda
    return {
        "torch": torch.__version__,
        "torch_build": f"CUDA {cuda}" if cuda else "CPU",
        "triton": _version("triton"),
        "gpus": _gpus() if cuda else [],
        "compiler": _compiler(),
        **_kernels(),
    }


def _gpus() -> list[str]:
    import torch  # here: OMP_NUM_THREADS is set before

    if not torch.cuda.is_available():
        return []
    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        f"{card.name}, {card.total_memory / 1e9:.0f} GB, compute {card.major}.{card.minor}"
        for card in cards
    ]


def _compiler() -> str | None:
    """The path of the compiler that the kernels take, and its version's first line."""
    path = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if path is None:
        return None
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=_VERSION_LIMIT_S
    )
    return f"{path}: {done.stdout.splitlines()[0] if done.stdout else 'no version'}"


def _kernels() -> dict[str, Any]:
    """Say whether the C++ kernels are there, why not, and the path of a product in each dtype."""
    import torch  # here: OMP_NUM_THREADS is set before

    from kernels.cpp import ops  # here: it imports torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_kernels = ops.library() is not None
    problem = str(caught[0].message) if caught else ""
    return {
        "cpp_kernels": has_kernels,
        "cpp_problem": problem,
        "fp32_path": product_path(torch.float32),
        "bf16_path": product_path(torch.bfloat16),
    }


def product_path(dtype: Any) -> str:
    """Name what multiplies a weight of this torch dtype on the CPU, in words."""
    import torch  # here: OMP_NUM_THREADS is set before

    from kernels.linear import is_native, is_packable  # here: it imports torch
    from kernels.torch import onednn  # here: it imports torch

    weight = torch.zeros(1, 1, dtype=dtype)
    if is_native(weight):
        return f"C++ ({_widest(dtype)})"
    if not is_packable(weight):
        return "PyTorch's own, the slowest"
    if not onednn.can_multiply(dtype):
        return "oneDNN, widened to fp32"
    return f"oneDNN ({_widest(dtype)})"


def _widest(dtype: Any) -> str:
    """The widest instructions that -march=native gives the C++ kernels."""
    import torch  # here: OMP_NUM_THREADS is set before

    if platform.machine() not in ("x86_64", "AMD64"):
        return platform.machine()
    if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        return "AVX-512 with bf16"
    if torch.cpu._is_avx512_supported():
        return "AVX-512"
    return "AVX2" if torch.cpu._is_avx2_supported() else "SSE"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(examine_engines()))
