"""Which back end an op runs on. The argument decides; "auto" follows the device of the tensor."""

from typing import Literal

import torch

from kernels._native import has_native

Backend = Literal["auto", "torch", "triton"]


def use_triton(backend: str, x: torch.Tensor) -> bool:
    """True where the Triton kernel is to run for `x`."""
    if backend == "auto":
        return x.is_cuda and x.dtype != torch.float64  # the kernels compute in fp32
    if backend == "torch":
        return False
    _check_backend(backend)
    if not (x.is_cuda or x.is_meta or _is_interpreted()):  # meta: compiled, not run
        raise ValueError(
            f"backend='triton' with a tensor on {x.device}: Triton runs on a GPU; use "
            "backend='auto', or set TRITON_INTERPRET=1 before the program starts"
        )
    return True


def use_native(backend: str, *tensors: torch.Tensor) -> bool:
    """True where the C++ kernel is to run: "auto", and all tensors on a CPU in one dtype of its."""
    _check_backend(backend)
    return backend == "auto" and has_native(*tensors)


def _check_backend(backend: str) -> None:
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend={backend!r}: must be 'auto', 'torch' or 'triton'")


def _is_interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_triton_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuses what the kernels would quietly compute in fp32."""
    if dtype not in TRITON_DTYPES:
        raise ValueError(
            f"{name}: dtype {dtype} must be float32, bfloat16 or float16 on Triton; use "
            "backend='torch' for others"
        )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which reductions run: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
