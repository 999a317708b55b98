"""Log-probabilities from logits that exist: what the sampler takes, with the trainer's bits.

On a CPU one pass of C++ (`cpp/logits.h`), else `softmax_parts`; on a GPU the kernel of
`linear_logprob`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_integers,
    check_tensors,
    check_triton_dtype,
    resolve,
    use_native,
    use_triton,
)
from kernels.cpp import ops as cpp_ops
from kernels.linear_logprob import check_ids, valid_temperature

_STATS = "kernels.gpu.linear_logprob:stats"


class SoftmaxParts(NamedTuple):
    """The softmax of each row, in fp32 (fp64): p = weights / Σ weights = exp(z − lse)."""

    z: Tensor  # [rows, V] tempered logits
    weights: Tensor  # [rows, V] exp(z − max z)
    lse: Tensor  # [rows] log Σ exp z


def softmax_parts(logits_BV: Tensor, temperature: float = 1.0) -> SoftmaxParts:
    """The softmax of logits / temperature, row by row: what both engines take log-probs from."""
    z = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    if temperature != 1.0:
        z = z / temperature
    highest = z.amax(-1, keepdim=True)
    weights = (z - highest).exp_()
    if z.shape[0] == 1:  # one long row would be split between threads; two rows are not
        total = weights.repeat(2, 1).sum(-1)[:1]
    else:
        total = weights.sum(-1)
    return SoftmaxParts(z, weights, total.log_().add_(highest.squeeze(1)))


def logits_logprob(
    logits_BV: Tensor,
    token_ids_B: Tensor,
    temperature: float = 1.0,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """fp32 log-prob of each row's token under softmax(logits / temperature); 0 means 1."""
    temperature = valid_temperature(temperature)
    if token_ids_B.shape != logits_BV.shape[:1]:
        raise ValueError(
            f"token_ids: shape {tuple(token_ids_B.shape)} must be one id for each of the "
            f"{logits_BV.shape[0]} rows of logits"
        )
    check_tensors(logits_BV, "logits", False, token_ids=token_ids_B)
    check_integers(token_ids=token_ids_B)
    if token_ids_B.device.type == "cpu":
        check_ids(token_ids_B, logits_BV.shape[1])
    if use_native(backend, logits_BV):
        return cpp_ops.score(logits_BV, token_ids_B.long(), temperature, False)[0]
    if use_triton(backend, logits_BV):  # the kernel of `linear_logprob`, so its bits
        check_triton_dtype("logits", logits_BV.dtype)
        logits_BV = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
        return resolve(_STATS)(logits_BV, token_ids_B.contiguous(), temperature, False)[0]
    parts = softmax_parts(logits_BV, temperature)
    return parts.z.gather(1, token_ids_B.unsqueeze(1)).squeeze(1) - parts.lse
