"""CPU path of `paged_attention`: the blocks of some sequences, side by side in the queries' dtype.

A cache of fp8 is widened here, after the gather: what a step reads, never the cache.
"""

import torch
from torch import Tensor

from kernels._attend import Scratch


def gather_blocks(
    name: str,
    cache: Tensor,
    factor: float,
    blocks: Tensor,
    num_seqs: int,
    dtype: torch.dtype,
    scratch: Scratch,
) -> Tensor:
    """The blocks of `num_seqs` sequences in `dtype`, [sequences, keys, heads, head_dim]."""
    shape = (blocks.shape[0], *cache.shape[1:])
    out = scratch.take(name, shape, dtype)
    if cache.dtype == dtype:
        torch.index_select(cache, 0, blocks, out=out)
    else:  # as bytes: PyTorch has no index_select of fp8
        raw = scratch.take("raw", shape, torch.uint8)
        torch.index_select(cache.view(torch.uint8), 0, blocks, out=raw)
        widen(raw.view(cache.dtype), factor, out, scratch)
    return out.view(num_seqs, -1, *cache.shape[2:])


def widen(low: Tensor, factor: float, out: Tensor, scratch: Scratch) -> None:
    """out = low · factor. PyTorch converts fp8 element by element, more than ten times slower than
    this: e4m3's bits, shifted to where fp16 has sign, exponent and mantissa, are the value times
    2^-8, subnormals too, and fp16 is widened by an instruction. Its NaN, which a cache of finite
    keys and values never holds, reads as 480."""
    if low.dtype != torch.float8_e4m3fn:
        out.copy_(low).mul_(factor)
        return
    bits = scratch.take("bits", low.shape, torch.int16).copy_(low.view(torch.int8))
    bits.bitwise_left_shift_(7).bitwise_and_(-16385)  # clears the second copy of the sign
    is_wide = out.dtype == torch.float32
    wide = out if is_wide else scratch.take("widened", low.shape, torch.float32)
    wide.copy_(bits.view(torch.float16)).mul_(256.0 * factor)
    if not is_wide:
        out.copy_(wide)
