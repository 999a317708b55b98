"""The host's part of linear_logprob.py's Triton path: buffers, and several tokens a row."""

import torch
from torch import Tensor

from kernels.triton import linear_logprob as triton_ops


def stats(
    logits: Tensor, token_ids: Tensor, temperature: float, wants_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of each row's id, log-sum-exp as two terms, entropy), whether wanted or not."""
    found: tuple[Tensor, Tensor, Tensor] = triton_ops.stats(logits, token_ids, temperature)
    return found


def gradient(logits, token_ids, temperature, lse, entropy, dlogp, dentropy) -> Tensor:
    """The gradient by the logits, in their memory; see `linear_logprob.py`."""
    is_one = token_ids.shape[1] == 1
    first = token_ids[:, 0].contiguous() if is_one else torch.full_like(token_ids[:, 0], -1)
    total = None if dlogp is None else dlogp.sum(1)
    dz = triton_ops.rewrite_to_gradient(logits, first, lse, entropy, total, dentropy, temperature)
    if dlogp is not None and not is_one:  # the kernel knows one token a row, or none: -1
        dz.scatter_add_(1, token_ids, (dlogp / temperature).to(dz.dtype))
    return dz
