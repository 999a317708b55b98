"""Checksums and copies of weights that move, at the memory's speed.

    checksums(xs)                     of each tensor the sum of w[i] · (2 i + 1) over its bytes as
                                      64-bit words w, modulo 2^64, as a signed number; the last word
                                      ends in zeros
    checksum(x)                       of one
    checksums_and_finite(xs)          beside it whether the tensor is free of NaN and infinity
    copy_with_checksums(outs, xs)     the checksums, taken while the tensors are copied
    copy_large(outs, xs)              copies that go past the caches where they can

They take all tensors of a model at once: threads that meet after each of hundreds of tensors spend
their time waiting where they share a core with others. On a CPU the C++ kernel does everything in
one pass; elsewhere, and without a compiler, PyTorch does. All give the same numbers. A checksum
notices accidents (a lost, stale, torn or exchanged piece), no forgeries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpp import ops
from kernels.memory import all_finite, are_floats, is_plain

_CHUNK_WORDS = 1 << 20  # the temporary memory of PyTorch's path: 16 MB


def checksums(xs: Sequence[Tensor]) -> list[int]:
    """Of tensors of any dtype and device; those that are not contiguous are copied first."""
    xs = [x.detach().contiguous() for x in xs]
    if is_plain(*xs):
        return ops.for_ranges(xs, has_sums=True)[0]
    return [_checksum_in_torch(x) for x in xs]


def checksum(x: Tensor) -> int:
    """`checksums` of one tensor."""
    return checksums([x])[0]


def checksums_and_finite(xs: Sequence[Tensor]) -> list[tuple[int, bool]]:
    """Of each tensor the checksum, and whether there is neither NaN nor infinity."""
    xs = [x.detach().contiguous() for x in xs]
    if is_plain(*xs) and are_floats(*xs):
        found = ops.for_ranges(xs, has_sums=True, has_finite=True)
    else:
        found = checksums(xs), all_finite(xs)
    return list(zip(*found, strict=True))


def copy_with_checksums(outs: Sequence[Tensor], xs: Sequence[Tensor]) -> list[int]:
    """Copy each x to its `out`, of the same shape and dtype; the checksums of the xs."""
    for out, x in zip(outs, xs, strict=True):
        if out.shape != x.shape or out.dtype != x.dtype:
            raise ValueError(
                f"out is {out.dtype} {tuple(out.shape)}, x is {x.dtype} {tuple(x.shape)}: they "
                "must be alike, because bytes are copied"
            )
    if is_plain(*outs, *xs):
        return ops.for_ranges(xs, outs, has_sums=True)[0]
    with torch.no_grad():
        for out, x in zip(outs, xs, strict=True):
            out.copy_(x)
    return checksums(xs)


def copy_large(outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """`out.copy_(x)` for each, also of another dtype; faster where it is only bytes, which then go
    past the caches where they can."""
    pairs = list(zip(outs, xs, strict=True))
    is_bytes = [
        out.shape == x.shape and out.dtype == x.dtype and is_plain(out, x) for out, x in pairs
    ]
    plain = [pair for pair, is_native in zip(pairs, is_bytes, strict=True) if is_native]
    ops.for_ranges([x for _, x in plain], [out for out, _ in plain])
    with torch.no_grad():
        for (out, x), is_native in zip(pairs, is_bytes, strict=True):
            if not is_native:
                out.copy_(x)


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
