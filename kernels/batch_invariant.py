"""Ops whose result for a row does not depend on how many other rows there are, bit for bit.

Libraries pick their algorithm by the shape: cuBLAS splits a long reduction among more programs when
there are few rows, and then adds in another order. A rollout decodes a few rows, the trainer scores
thousands: the same weights give other log-probs. Here the tile and the order of every sum are fixed
by the row's length alone.

* `matmul_batch_invariant`: one tile shape for every number of rows, no split of the reduction. On a
  CPU, `linear_rows`, which has that property (kernels/linear.py).
* `log_softmax_batch_invariant`: one program a row, blocks in order.
* `rms_norm` has the property as it is (one program a row): tests show it for both.
* attention needs a fixed split *size* of the keys instead of a fixed number of splits:
  `paged_attention_decode(..., split_size=...)`.

Backward passes use the same kernels: dA is batch-invariant too, dB (a sum over the rows) is
deterministic.

Source: "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import Backend, check_tensors, check_triton_dtype, use_triton
from kernels.linear import linear_rows, matmul_rows
from kernels.linear_logprob import softmax_parts


def matmul_batch_invariant_ref(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """The definition."""
    return a_MK @ b_KN


def log_softmax_batch_invariant_ref(x: Tensor) -> Tensor:
    """The definition; fp32 (fp64) result."""
    return torch.log_softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -1)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, on_triton):
        ctx.save_for_backward(a, b)
        ctx.on_triton = on_triton
        return _multiply(a, b, on_triton)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        da = db = None
        if ctx.needs_input_grad[0]:
            da = _multiply(dy, b.t(), ctx.on_triton)
        if ctx.needs_input_grad[1]:
            db = _multiply(a.t(), dy, True) if ctx.on_triton else matmul_rows(a.t(), dy)
        return da, db, None


def _multiply(a: Tensor, b: Tensor, on_triton: bool) -> Tensor:
    if not on_triton:
        return linear_rows(a.contiguous(), b.t(), None, None)
    from kernels.triton import batch_invariant as triton_ops

    return triton_ops.matmul(a, b)


def matmul_batch_invariant(a_MK: Tensor, b_KN: Tensor, *, backend: Backend = "auto") -> Tensor:
    """a · b. Row m of the result depends on row m of `a` and on `b` only. Differentiable."""
    if a_MK.dim() != 2 or b_KN.dim() != 2 or a_MK.shape[1] != b_KN.shape[0]:
        raise ValueError(
            f"b: shape {tuple(b_KN.shape)} must be [{a_MK.shape[-1]}, columns] to follow a "
            f"{tuple(a_MK.shape)}"
        )
    if a_MK.dtype != b_KN.dtype:
        raise ValueError(f"b: dtype {b_KN.dtype} must be a's {a_MK.dtype}; cast one of them")
    on_triton = use_triton(backend, a_MK)
    check_tensors(a_MK, "a", on_triton, b=b_KN)
    if on_triton:
        check_triton_dtype("a", a_MK.dtype)
    y_MN: Tensor = _Matmul.apply(a_MK, b_KN, on_triton)
    return y_MN


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RV, on_triton):
        if on_triton:
            from kernels.triton import batch_invariant as triton_ops

            y_RV = triton_ops.log_softmax(x_RV)
        else:
            y_RV = _log_softmax(x_RV)
        ctx.save_for_backward(y_RV)
        ctx.on_triton, ctx.dtype = on_triton, x_RV.dtype
        return y_RV

    @staticmethod
    def backward(ctx, dy_RV):
        (y_RV,) = ctx.saved_tensors
        if ctx.on_triton:
            from kernels.triton import batch_invariant as triton_ops

            return triton_ops.log_softmax_backward(dy_RV, y_RV, ctx.dtype), None
        return (dy_RV - y_RV.exp() * _row_sum(dy_RV)).to(ctx.dtype), None


def _log_softmax(x_RV: Tensor) -> Tensor:
    z_RV, weights_RV, lse_R = softmax_parts(x_RV)
    return torch.sub(z_RV, lse_R.unsqueeze(1), out=weights_RV)


def _row_sum(x_RV: Tensor) -> Tensor:
    return x_RV.repeat(2, 1).sum(-1, True)[:1] if x_RV.shape[0] == 1 else x_RV.sum(-1, True)


def log_softmax_batch_invariant(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """log softmax over the last dimension, in fp32 (fp64); any leading shape. Differentiable."""
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: shape {tuple(x.shape)} must end in at least one class")
    on_triton = use_triton(backend, x)
    check_tensors(x, "x", on_triton)
    if on_triton:
        check_triton_dtype("x", x.dtype)
    y: Tensor = _LogSoftmax.apply(x.reshape(-1, x.shape[-1]), on_triton)
    return y.view(x.shape)
