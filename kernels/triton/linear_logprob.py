"""Triton kernels of `linear_logprob`: two passes over a chunk of logits that a matmul produced.

Forward, one program a row reads the logits once (running maximum and sums). Backward, the chunk is
overwritten with its own gradient, so no second one is allocated. Rows are padded to a multiple of
16 elements, and loads and stores reach to the end of the padding: with an odd vocabulary as their
bound they would fall apart into 2-byte ones.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch

_BLOCK = 4096
_NUM_WARPS = 8
_ROW_ALIGNMENT = 16


@triton.jit
def _temper(logits, inverse, inverse_rest):
    """logits / temperature to the last bit but one: a single fp32 reciprocal would shift every
    logit of a row the same way, and with it the sum of the row's probabilities."""
    z = logits.to(tl.float32)
    return z * inverse + z * inverse_rest


@triton.jit
def _stats_kernel(
    logits_ptr, token_ptr, logp_ptr, lse_ptr, entropy_ptr, vocab, stride, inverse, inverse_rest,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    top = tl.full([1], -float("inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)  # Σ exp(z − top)
    moment = tl.zeros([1], dtype=tl.float32)  # Σ exp(z − top) · (z − top)
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < vocab
        z = _temper(tl.load(logits_ptr + cols, cols < stride, other=0.0), inverse, inverse_rest)
        z = tl.where(mask, z, -float("inf"))
        new_top = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(total > 0, top - new_top, 0.0)
        shrink = tl.where(total > 0, tl.exp(shift), 0.0)
        centred = tl.where(mask, z - new_top, 0.0)
        e = tl.where(mask, tl.exp(centred), 0.0)
        moment = shrink * (moment + shift * total) + tl.sum(e * centred, 0)
        total = shrink * total + tl.sum(e, 0)
        top = new_top
    token = tl.load(token_ptr + row)
    is_token = (token >= 0) & (token < vocab)  # NaN for others, not a read outside
    z = _temper(tl.load(logits_ptr + token, is_token, other=float("nan")), inverse, inverse_rest)
    log_total = tl.log(total)
    one = tl.arange(0, 1)
    tl.store(logp_ptr + row + one, z - top - log_total)
    tl.store(lse_ptr + row * 2 + one, top)
    tl.store(lse_ptr + row * 2 + 1 + one, log_total)
    tl.store(entropy_ptr + row + one, log_total - moment / total)


@triton.jit
def _dlogits_kernel(
    logits_ptr, token_ptr, lse_ptr, entropy_ptr, dlogp_ptr, dentropy_ptr, vocab, stride,
    inverse, inverse_rest,
    HAS_DLOGP: tl.constexpr, HAS_DENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < vocab
    source = logits_ptr + row * stride + cols
    z = _temper(tl.load(source, cols < stride, other=0.0), inverse, inverse_rest)
    logp = tl.where(mask, z - tl.load(lse_ptr + row * 2) - tl.load(lse_ptr + row * 2 + 1), 0.0)
    p = tl.exp(logp)
    grad = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_DLOGP:
        hit = tl.where(cols == tl.load(token_ptr + row), 1.0, 0.0)
        grad += tl.load(dlogp_ptr + row) * (hit - p)
    if HAS_DENTROPY:
        grad -= tl.load(dentropy_ptr + row) * p * (logp + tl.load(entropy_ptr + row))
    tl.store(source, (grad * inverse).to(logits_ptr.dtype.element_ty), cols < stride)


def _inverse(temperature: float) -> tuple[float, float]:
    """1 / temperature as a sum of two fp32 numbers."""
    (high,) = struct.unpack("f", struct.pack("f", 1.0 / temperature))
    return high, 1.0 / temperature - high


def logits_buffer(num_rows: int, head_VD: Tensor) -> Tensor:
    """[num_rows, V] with padded rows."""
    vocab = head_VD.shape[0]
    return head_VD.new_empty(num_rows, -(-vocab // _ROW_ALIGNMENT) * _ROW_ALIGNMENT)[:, :vocab]


def stats(
    logits_CV: Tensor, token_ids_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp [C], logsumexp [C, 2], entropy [C]), fp32. The logsumexp is kept as maximum and log of
    the sum: added up it would lose bits that every probability of the row then lacks."""
    num_rows, vocab = logits_CV.shape
    if logits_CV.stride(0) % _ROW_ALIGNMENT:  # the compiler would lay a row out, and add, otherwise
        logits_CV = logits_buffer(num_rows, logits_CV.t()).copy_(logits_CV)
    out = torch.empty(2, num_rows, dtype=torch.float32, device=logits_CV.device)
    lse = torch.empty(num_rows, 2, dtype=torch.float32, device=logits_CV.device)
    if num_rows:
        launch(_stats_kernel, (num_rows,))(
            logits_CV, token_ids_C, out[0], lse, out[1], vocab, logits_CV.stride(0),
            *_inverse(temperature), BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out[0], lse, out[1]


def rewrite_to_gradient(
    logits_CV: Tensor,
    token_ids_C: Tensor,
    lse_C2: Tensor,
    entropy_C: Tensor | None,
    dlogp_C: Tensor | None,
    dentropy_C: Tensor | None,
    temperature: float,
) -> Tensor:
    """Overwrites logits with the loss's gradient by them."""
    num_rows, vocab = logits_CV.shape
    absent = lse_C2
    launch(_dlogits_kernel, (num_rows, triton.cdiv(vocab, _BLOCK)))(
        logits_CV,
        token_ids_C,
        lse_C2,
        absent if entropy_C is None else entropy_C,
        absent if dlogp_C is None else dlogp_C.contiguous(),
        absent if dentropy_C is None else dentropy_C.contiguous(),
        vocab,
        logits_CV.stride(0),
        *_inverse(temperature),
        HAS_DLOGP=dlogp_C is not None,
        HAS_DENTROPY=dentropy_C is not None,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return logits_CV
