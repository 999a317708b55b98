"""Ops whose result for a row does not depend on how many other rows there are, bit for bit.

Libraries pick their algorithm by the shape: cuBLAS splits a long reduction among more programs when
there are few rows, and then adds in another order. A rollout decodes a few rows, the trainer scores
thousands: the same weights give other log-probs. Here the tile and the order of every sum are fixed
by the row's length alone.

* `linear(..., batch_invariant=True)`: one tile shape for every number of rows, no split of the
  reduction; so do `linear_logprob` and, over the rows of each expert, `fused_moe`.
* `log_softmax_batch_invariant`, below: one program a row, blocks in order.
* `flash_attn_varlen` and `paged_attention` with `batch_invariant=True` take equal tiles of keys and
  do not split a context, so that training, prefill and decoding agree.
* `rms_norm` and the other row ops have the property as they are (one program a row).

A model asks for all of them by `Transformer.batch_invariant`. On a CPU every op is batch-invariant.

Source: "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import Backend, check_tensors, check_triton_dtype, use_triton
from kernels.logits.logprob import softmax_parts


def log_softmax_batch_invariant_ref(x: Tensor) -> Tensor:
    """The definition; fp32 (fp64) result."""
    return torch.log_softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -1)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RV, on_triton):
        if on_triton:
            # Here: not every machine has Triton.
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
            # Here: not every machine has Triton.
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
