"""fp8 to a wider dtype on a CPU, for attention over a cache of fp8."""

import torch
from torch import Tensor

from kernels._attend import Scratch


def widen_fp8(low: Tensor, factor: float, out: Tensor, scratch: Scratch) -> None:
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
