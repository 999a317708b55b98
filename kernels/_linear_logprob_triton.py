"""Triton kernels of `linear_logprob`: two passes over a chunk of logits that a matmul produced.

Forward, one program a row reads the logits once (running maximum and sums). Backward, the chunk is
overwritten with its own gradient, so no second one is allocated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _stats_kernel(
    logits_ptr, token_ptr, logp_ptr, lse_ptr, entropy_ptr, vocab, inv_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    top = tl.full([1], -float("inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)  # Σ exp(z − top)
    moment = tl.zeros([1], dtype=tl.float32)  # Σ exp(z − top) · (z − top)
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < vocab
        z = tl.load(logits_ptr + cols, mask, other=-float("inf")).to(tl.float32) * inv_temperature
        new_top = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(total > 0, top - new_top, 0.0)
        shrink = tl.where(total > 0, tl.exp(shift), 0.0)
        centred = tl.where(mask, z - new_top, 0.0)
        e = tl.where(mask, tl.exp(centred), 0.0)
        moment = shrink * (moment + shift * total) + tl.sum(e * centred, 0)
        total = shrink * total + tl.sum(e, 0)
        top = new_top
    token = tl.load(token_ptr + row)
    z = tl.load(logits_ptr + token).to(tl.float32) * inv_temperature
    log_total = tl.log(total)
    one = tl.arange(0, 1)
    tl.store(logp_ptr + row + one, z - top - log_total)
    tl.store(lse_ptr + row + one, top + log_total)
    tl.store(entropy_ptr + row + one, log_total - moment / total)


@triton.jit
def _dlogits_kernel(
    logits_ptr, token_ptr, lse_ptr, entropy_ptr, dlogp_ptr, dentropy_ptr, vocab, inv_temperature,
    HAS_DLOGP: tl.constexpr, HAS_DENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < vocab
    source = logits_ptr + row * vocab + cols
    z = tl.load(source, mask, other=-float("inf")).to(tl.float32) * inv_temperature
    logp = tl.where(mask, z - tl.load(lse_ptr + row), 0.0)
    p = tl.exp(logp)
    grad = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_DLOGP:
        hit = tl.where(cols == tl.load(token_ptr + row), 1.0, 0.0)
        grad += tl.load(dlogp_ptr + row) * (hit - p)
    if HAS_DENTROPY:
        grad -= tl.load(dentropy_ptr + row) * p * (logp + tl.load(entropy_ptr + row))
    tl.store(source, (grad * inv_temperature).to(logits_ptr.dtype.element_ty), mask)


def stats(
    logits_CV: Tensor, token_ids_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, logsumexp, entropy) of each row, fp32."""
    num_rows, vocab = logits_CV.shape
    out = torch.empty(3, num_rows, dtype=torch.float32, device=logits_CV.device)
    if num_rows:
        _stats_kernel[(num_rows,)](
            logits_CV, token_ids_C, out[0], out[1], out[2], vocab, 1.0 / temperature, BLOCK=_BLOCK
        )
    return out[0], out[1], out[2]


def rewrite_to_gradient(
    logits_CV: Tensor,
    token_ids_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor | None,
    dlogp_C: Tensor | None,
    dentropy_C: Tensor | None,
    temperature: float,
) -> Tensor:
    """Overwrites logits with the loss's gradient by them."""
    num_rows, vocab = logits_CV.shape
    absent = lse_C
    _dlogits_kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](
        logits_CV,
        token_ids_C,
        lse_C,
        absent if entropy_C is None else entropy_C,
        absent if dlogp_C is None else dlogp_C.contiguous(),
        absent if dentropy_C is None else dentropy_C.contiguous(),
        vocab,
        1.0 / temperature,
        HAS_DLOGP=dlogp_C is not None,
        HAS_DENTROPY=dentropy_C is not None,
        BLOCK=_BLOCK,
    )
    return logits_CV
