"""What weights are asked and how they move: checksums, finiteness and copies at the memory's speed.

    checksum(x)                   the sum of w[i] · (2 i + 1) over the bytes of x as 64-bit words w,
                                  modulo 2^64, as a signed number; the last word ends in zeros
    copy_with_checksum(out, x)    the same while x is copied
    copy_large(out, x)            x, past the caches where it can go there
    all_finite(x)                 neither NaN nor infinity in x; may stay on the device

On a CPU the C++ kernel does both in one pass; elsewhere, and without a compiler, PyTorch does. All
give the same number. It notices accidents (a lost, stale, torn or exchanged piece), no forgeries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpp import build, ops

_LARGE_BYTES = 1 << 20  # less is better left in the cache
_CHUNK_WORDS = 1 << 20  # the temporary memory of PyTorch's path: 16 MB


def checksum(x: Tensor) -> int:
    """Of a tensor of any dtype and device; one that is not contiguous is copied first."""
    x = x.detach().contiguous()
    if x.is_cpu and build.library() is not None:
        return ops.checksum(x)
    return _checksum_in_torch(x)


def copy_with_checksum(out: Tensor, x: Tensor) -> int:
    """Copy x to `out`, of the same shape and dtype, and return the checksum of x."""
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, x is {x.dtype} {tuple(x.shape)}: they must be "
            "alike, because bytes are copied"
        )
    if _are_plain(out, x):
        return ops.checksum(x.detach(), out)
    with torch.no_grad():
        out.copy_(x)
    return checksum(x)


def copy_large(out: Tensor, x: Tensor) -> None:
    """`out.copy_(x)`, also of another dtype; faster where it is only bytes, and many."""
    is_alike = out.shape == x.shape and out.dtype == x.dtype and out.nbytes >= _LARGE_BYTES
    if is_alike and _are_plain(out, x):
        ops.copy_bytes(out.detach(), x.detach())
    else:
        with torch.no_grad():
            out.copy_(x)


def all_finite(x: Tensor) -> Tensor:
    """A bool, on the tensor's device: a GPU is not waited for."""
    if build.has_native(x) and x.is_contiguous():
        return torch.tensor(ops.all_finite(x))
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    # The extremes are finite if and only if all values are: NaN propagates to both.
    return torch.isfinite(torch.stack(x.aminmax())).all()


def _are_plain(*tensors: Tensor) -> bool:
    is_plain = all(x.is_cpu and x.is_contiguous() for x in tensors)
    return is_plain and build.library() is not None


def _checksum_in_torch(x: Tensor) -> int:
    data = x.reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for number, chunk in enumerate(data.split(8 * _CHUNK_WORDS)):
        rest = -len(chunk) % 8
        if rest or chunk.storage_offset() % 8:  # a view as words needs whole ones in their places
            chunk = torch.cat([chunk, chunk.new_zeros(rest)])
        words = chunk.view(torch.int64)
        weights = torch.arange(len(words), device=x.device).add_(number * _CHUNK_WORDS)
        total += (words * weights.mul_(2).add_(1)).sum()
    return int(total)
