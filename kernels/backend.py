"""Which path an op takes, and the checks of arguments that ops share.

Every op takes `backend="auto" | "torch" | "cpp" | "triton"`. "auto" follows the device of the
tensors: Triton on a GPU; on a CPU C++ where there is a kernel for their dtype and a compiler, else
PyTorch. A named back end runs or raises `ValueError` with the reason; it never gives way to
another. A backward pass runs on the back end of its forward pass.

C++ is called by the ops themselves. The other paths they know by name only ("module:function", in
a table at the top of each file), and `resolve` imports one when it is first taken.

The checks come before any work: a kernel would read wrong memory where PyTorch raises, and
PyTorch's own message names no argument.
"""

import functools
import math
import pkgutil
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.cpp.ops import has_native

_WHY_NOT = "kernels.cpp.build:why_not_native"

Backend = Literal["auto", "torch", "cpp", "triton"]
Path = Literal["cpp", "triton", "torch"]
"""A back end that was chosen."""

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def resolve(name: str) -> Any:
    """What "package.module:name" names. A table of names keeps what this path does not need out of
    the process: Triton on a CPU, PyTorch's fallbacks where there is a compiler."""
    return pkgutil.resolve_name(name)


def use_triton(backend: str, x: Tensor, *, has_cpp: bool = False) -> bool:
    """True where the Triton kernel is to run for `x`. `has_cpp` ops go on to ask `use_native`."""
    if backend == "auto":
        return x.is_cuda and x.dtype != torch.float64  # the kernels compute in fp32
    if backend == "torch":
        return False
    _check_backend(backend)
    if backend == "cpp":
        if not has_cpp:
            raise ValueError(
                "backend='cpp': this op has no C++ kernel; use backend='auto' or 'torch'"
            )
        return False
    if not (x.is_cuda or x.is_meta or _is_interpreted()):  # meta: compiled, not run
        raise ValueError(
            f"backend='triton' with a tensor on {x.device}: Triton runs on a GPU; use "
            "backend='auto', or set TRITON_INTERPRET=1 before the program starts"
        )
    return True


def use_native(backend: str, *tensors: Tensor, refusal: str | None = None) -> bool:
    """True where the C++ kernel is to run for these. `refusal` says why the op's cannot take the
    arguments, whatever their device and dtype."""
    if backend == "auto":
        return refusal is None and has_native(*tensors)
    _check_backend(backend)
    if backend != "cpp":
        return False
    reason = refusal or (None if has_native(*tensors) else resolve(_WHY_NOT)(tensors))
    if reason is not None:
        raise ValueError(f"backend='cpp': {reason}; use backend='auto' or 'torch'")
    return True


def chosen(on_triton: bool, is_native: bool) -> Path:
    """The path of a call from the answers of `use_triton` and `use_native`."""
    return "cpp" if is_native else "triton" if on_triton else "torch"


def _check_backend(backend: str) -> None:
    if backend not in ("auto", "torch", "cpp", "triton"):
        raise ValueError(f"backend={backend!r}: must be 'auto', 'torch', 'cpp' or 'triton'")


def _is_interpreted() -> bool:
    import triton  # here: not every machine has it

    return bool(triton.knobs.runtime.interpret)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which reductions run: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_triton_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuses what the kernels would quietly compute in fp32."""
    if dtype not in TRITON_DTYPES:
        raise ValueError(
            f"{name}: dtype {dtype} must be float32, bfloat16 or float16 on Triton; use "
            "backend='torch' for others"
        )


def check_tensors(x: Tensor, name: str, on_triton: bool, **others: Tensor | None) -> None:
    """`x` is floating point (on Triton not fp64) and every other tensor lies on its device."""
    check_floating(**{name: x})
    if on_triton and x.dtype == torch.float64:
        raise ValueError(
            f"{name}: float64 would be computed in float32; use backend='torch' or a smaller dtype"
        )
    for other_name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{other_name}: is on {other.device}, must be on {name}'s {x.device}")


def check_floating(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not x.dtype.is_floating_point:
            raise ValueError(f"{name}: dtype {x.dtype} must be floating point")


def check_integers(**tensors: object) -> None:
    """Tensors of indices; lists of numbers pass."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: dtype {x.dtype} must be int32 or int64")


def check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1")


def scale_of(softmax_scale: float | None, q_THD: Tensor) -> float:
    """What scores are multiplied by, head_dim ** -0.5 unless given. ValueError if it is not
    positive: the largest score is found among the products, before the scale."""
    scale = q_THD.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale={scale}: must be a positive number")
    return scale


def check_sinks(sinks: Tensor | None, q_THD: Tensor) -> None:
    """One number for each query head, beside the queries."""
    if sinks is None:
        return
    if sinks.shape != q_THD.shape[1:2]:
        raise ValueError(
            f"sinks: shape {tuple(sinks.shape)} must be one number for each of q's "
            f"{q_THD.shape[1]} heads"
        )
    check_tensors(q_THD, "q", False, sinks=sinks)
    check_floating(sinks=sinks)


def wide_sinks(sinks: Tensor | None, q_THD: Tensor) -> Tensor | None:
    """The sinks in the dtype of the softmax, contiguous."""
    return None if sinks is None else sinks.to(compute_dtype(q_THD.dtype)).contiguous()


def check_bounds(
    name: str, cu_seqlens: Tensor | Sequence[int], num_tokens: int | None = None
) -> None:
    """[sequences + 1] from 0, to `num_tokens` where given. A GPU's values are not read: that would
    stop it."""
    if isinstance(cu_seqlens, Tensor) and (cu_seqlens.dim() != 1 or not len(cu_seqlens)):
        raise ValueError(f"{name}: shape {tuple(cu_seqlens.shape)} must be [sequences + 1]")
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type != "cpu":
        return
    bounds = ints(cu_seqlens)
    if not bounds or bounds[0] != 0 or bounds != sorted(bounds):
        raise ValueError(f"{name}={bounds}: must start at 0 and never decrease")
    if num_tokens is not None and bounds[-1] != num_tokens:
        raise ValueError(f"{name}: ends at {bounds[-1]}, must end at the {num_tokens} tokens")


def ints(x: Tensor | Sequence[int]) -> list[int]:
    return x.tolist() if isinstance(x, Tensor) else list(x)
