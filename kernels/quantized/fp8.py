"""fp8 (e4m3: 4 exponent bits, 3 of mantissa, ±448) with fp32 scales, and the matmul on it.

    scale_g = max |x| over the group / 448        q = round(x / scale_g)        x ≈ q · scale_g

Groups (`group_size`): None is a whole row (per token of an activation, per output of a weight);
128 is 1 × 128 along the row, the activations of DeepSeek-V3; (128, 128) is its weights. A last
group that is not full is just smaller. Rounding is to nearest even and saturates.

    y[m, n] = Σ_k (xq · xs)[m, k] · (wq · ws)[n, k]

The tensor core adds fp8 products with about 14 bits, so sums over long K drift. Partial sums of
128 products are therefore added up in fp32 registers: with a scale a group of 128 they have to be
scaled one by one anyway, with one scale a row it is asked for (`max_num_imprecise_acc`).

Forward only: a quantised weight has no gradient. The inference engine calls it with
`InferConfig(quantization="fp8")`. On a CPU the factors are widened to fp32 and multiplied there,
for every product again: the definition, not a fast path. Left out: e5m2, fp8 training, scales in
powers of two (ue8m0). Source: DeepSeek-V3 report (arXiv 2412.19437), section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import Backend, check_tensors, use_triton
from kernels.linear import linear_rows

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128
_SMALLEST_MAX = 1e-12  # a group of zeros gets a scale that does not divide by zero
GroupSize = int | tuple[int, int] | None
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantize_fp8_ref(x_NK: Tensor, group_size: GroupSize = None) -> tuple[Tensor, Tensor]:
    """The definition. Triton gives the same bits."""
    rows, cols = _group_shape(x_NK, group_size)
    padded = _pad(x_NK.float(), rows, cols)
    grouped = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    largest = grouped.abs().amax((1, 3)).clamp_min(_SMALLEST_MAX)
    # By a tensor: by a number a GPU multiplies with the inverse, which rounds differently.
    scale = largest / torch.full_like(largest, FP8_MAX)
    scaled = grouped * (1.0 / scale)[:, None, :, None]
    q = scaled.clamp(-FP8_MAX, FP8_MAX).view(padded.shape)[: x_NK.shape[0], : x_NK.shape[1]]
    return q.to(FP8), scale.squeeze(1) if group_size is None else scale


def dequantize_fp8(q_NK: Tensor, scale: Tensor) -> Tensor:
    """fp32 values; the shape of `scale` says which groups it is of."""
    num_rows, num_cols = q_NK.shape
    if scale.dim() == 1:
        return q_NK.float() * scale[:, None]
    per_row = scale if scale.shape[0] == num_rows else _repeat(scale, 0, num_rows)
    return q_NK.float() * _repeat(per_row, 1, num_cols)


def _repeat(scale: Tensor, dim: int, length: int) -> Tensor:
    return scale.repeat_interleave(GROUP, dim).narrow(dim, 0, length)


def _group_shape(x: Tensor, group_size: GroupSize) -> tuple[int, int]:
    if group_size is None:
        return 1, max(1, x.shape[1])
    return (1, group_size) if isinstance(group_size, int) else group_size


def _pad(x: Tensor, rows: int, cols: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))


def quantize_fp8(
    x_NK: Tensor, group_size: GroupSize = None, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """(q [N, K] float8_e4m3fn, scale fp32): scale is [N] for None, [N, ceil(K / 128)] for 128,
    [ceil(N / 128), ceil(K / 128)] for (128, 128)."""
    if x_NK.dim() != 2 or x_NK.dtype not in FLOATS:
        raise ValueError(
            f"x: {x_NK.dtype} {tuple(x_NK.shape)} must be [rows, columns] in float32, bfloat16 or "
            "float16"
        )
    if group_size not in (None, GROUP, (GROUP, GROUP)):
        raise ValueError(f"group_size={group_size}: must be None (a row), 128 or (128, 128)")
    if not use_triton(backend, x_NK):
        return quantize_fp8_ref(x_NK, group_size)
    from kernels.triton import fp8 as triton_ops  # here: not every machine has Triton

    return triton_ops.quantize(x_NK, *_group_shape(x_NK, group_size), group_size is None)


def fp8_linear_ref(
    x_MK: Tensor, w_NK: Tensor, x_scale: Tensor, w_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """The definition: widen, multiply in fp32, round once. Row-invariant on a CPU."""
    x, w = dequantize_fp8(x_MK, x_scale), dequantize_fp8(w_NK, w_scale)
    return linear_rows(x, w, None, None).to(out_dtype)


def fp8_linear(
    x_MK: Tensor,
    w_NK: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """y [M, N] = x · wᵀ of fp8 tensors as `quantize_fp8` gives them: both with one scale a row,
    or x in groups of 128 and w in blocks of 128 × 128."""
    _check_linear(x_MK, w_NK, x_scale, w_scale, out_dtype)
    if not use_triton(backend, x_MK):
        return fp8_linear_ref(x_MK, w_NK, x_scale, w_scale, out_dtype)
    from kernels.triton import fp8 as triton_ops  # here: not every machine has Triton

    return triton_ops.linear(x_MK, w_NK, x_scale, w_scale, out_dtype)


def _check_linear(x: Tensor, w: Tensor, xs: Tensor, ws: Tensor, out_dtype: torch.dtype) -> None:
    for name, t in (("x", x), ("w", w)):
        if t.dtype != FP8 or t.dim() != 2:
            raise ValueError(f"{name}: {t.dtype} {tuple(t.shape)} must be float8_e4m3fn [rows, K]")
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"x: {x.shape[1]} columns must be the {w.shape[1]} of w")
    groups = -(-x.shape[1] // GROUP)
    allowed = [
        ((x.shape[0],), (w.shape[0],)),
        ((x.shape[0], groups), (-(-w.shape[0] // GROUP), groups)),
    ]
    if (tuple(xs.shape), tuple(ws.shape)) not in allowed:
        raise ValueError(
            f"x_scale, w_scale: shapes {tuple(xs.shape)}, {tuple(ws.shape)} for x "
            f"{tuple(x.shape)} and w {tuple(w.shape)} must be {allowed[0]} (a row) or "
            f"{allowed[1]} (groups of 128)"
        )
    check_tensors(x, "x", False, w=w, x_scale=xs, w_scale=ws)
    if xs.dtype != torch.float32 or ws.dtype != torch.float32:
        raise ValueError(f"x_scale, w_scale: {xs.dtype}, {ws.dtype} must be float32")
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype={out_dtype}: must be float32, bfloat16 or float16")
