"""Attention of padded rows in PyTorch on a CPU, the same bits for a query however it is batched.

    o = softmax(scale · q · Kᵀ + mask) · V

Where there is no C++ for it (`native/attention.h`) both engines run this arithmetic, so decoding
repeats the trainer's bits; gradients recompute its probabilities. What makes a query's
result independent of its neighbours, of padding, of the chunk it came in and of threads:

* bf16: oneDNN's batched matmul, which sums each output in order whatever the other sizes are
  (`safe_rows` keeps tiny products from going elsewhere).
  Scores are rounded to bf16, as in any unfused bf16 attention; softmax runs in fp32. (torch's
  fused CPU attention was not invariant: at 200 to 300 keys the last bit moved with the padding.)
* fp32: MKL's batched matmul is invariant given at least 4 rows a thread and a product with V cut
  into blocks of exactly 128 keys that are added in order.
* bf16 where the processor has no product of it is widened to fp32 before, and the result rounded.
* keys are padded to `key_multiple`, masked with −inf, so they add exact zeros.

Legend: N sequences x key heads, R rows (queries of a group's heads), L padded keys, D head_dim.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._onednn import is_bf16_fast

KEY_BLOCK = 128
"""fp32 keys are padded to this, and P·V is summed in blocks of it."""

MIN_ROWS = 4
"""Fewer fp32 rows take another MKL kernel, with other bits."""


_SMALL_MATRIX, _SMALL_BATCH = 400, 16**3
"""Multiplications of a product, and of a batch of them, up to which torch does without oneDNN."""


def is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What attention of this dtype is computed in."""
    return torch.float32 if dtype == torch.bfloat16 and not is_bf16_fast() else dtype


def for_products(*tensors: Tensor) -> list[Tensor]:
    return [x.to(product_dtype(x.dtype)) for x in tensors]


def key_multiple(dtype: torch.dtype) -> int:
    """The number of keys is padded to a multiple of this."""
    return 16 if is_half(product_dtype(dtype)) else KEY_BLOCK


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def bucket_by_length(lengths: Sequence[int], multiple: int) -> list[list[int]]:
    """Splits indices into groups whose padded lengths differ by at most a third.

    Members keep their order, so a batch that fits one group keeps the batch's order.
    """
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padded = round_up(lengths[i], multiple)
        if not groups or padded * 3 < longest * 2:
            groups.append([])
            longest = padded
        groups[-1].append(i)
    return [sorted(g) for g in groups]


class Scratch:
    """Buffers that outlive a call. A fresh large tensor costs a page fault for every 4 KB, which
    for attention is more than the arithmetic; a buffer reused by all layers costs it once."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until the same name is taken again."""
        size = 1
        for n in shape:
            size *= n
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(*shape)


def probabilities(
    q_NRD: Tensor, k_NLD: Tensor, mask_B1QM: Tensor, scale: float, scratch: Scratch
) -> Tensor:
    """softmax(scale · q · Kᵀ + mask) in fp32 (fp64), [N, R or more, L]: see `safe_rows`.

    Rows are heads x the mask's Q queries; the mask applies to the last M keys.
    """
    rows, num_keys = q_NRD.shape[1], k_NLD.shape[1]
    padded = safe_rows(rows, q_NRD.shape[0], q_NRD.shape[2], q_NRD.dtype)
    if padded > rows:
        q_NRD = F.pad(q_NRD, (0, 0, 0, padded - rows))
    shape = (q_NRD.shape[0], padded, num_keys)
    wide = raw = scratch.take("scores", shape, q_NRD.dtype)
    torch.bmm(q_NRD, k_NLD.transpose(1, 2), out=raw)
    if is_half(raw.dtype):
        wide = scratch.take("wide", shape, torch.float32).copy_(raw)
    wide.mul_(scale)
    num_seqs, _, num_queries, num_masked = mask_B1QM.shape
    grid = wide[:, :rows, num_keys - num_masked :].unflatten(0, (num_seqs, -1))
    grid.unflatten(2, (-1, num_queries)).add_(mask_B1QM.unsqueeze(1))
    return torch.softmax(wide, -1, out=scratch.take("p", shape, wide.dtype))


def safe_rows(rows: int, num_matrices: int, head_dim: int, dtype: torch.dtype) -> int:
    """The rows to compute so that a product is computed as larger ones are.

    Half: torch hands a product to oneDNN only from a certain size on. fp32: MKL shares the rows
    out where there are fewer matrices than threads, and none may get fewer than 4.
    """
    if is_half(dtype):
        smallest = head_dim * key_multiple(dtype)  # of one row, with the fewest keys
        at_least = _SMALL_BATCH // (num_matrices * smallest) + 1
        return max(rows, at_least, -(-_SMALL_MATRIX // smallest))
    num_threads = torch.get_num_threads()
    if num_matrices < num_threads:
        return round_up(rows, MIN_ROWS * num_threads)
    return max(rows, MIN_ROWS)


def weighted_values(p_NRL: Tensor, v_NLD: Tensor, scratch: Scratch) -> Tensor:
    """P · V in v's dtype."""
    if is_half(v_NLD.dtype):
        return torch.bmm(scratch.take("low", p_NRL.shape, v_NLD.dtype).copy_(p_NRL), v_NLD)
    out = torch.bmm(p_NRL[:, :, :KEY_BLOCK], v_NLD[:, :KEY_BLOCK])
    part = scratch.take("part", out.shape, out.dtype)
    for lo in range(KEY_BLOCK, v_NLD.shape[1], KEY_BLOCK):
        block = slice(lo, lo + KEY_BLOCK)
        out += torch.bmm(p_NRL[:, :, block], v_NLD[:, block], out=part)
    return out


def attend_rows(
    q_NRD: Tensor, k_NLD: Tensor, v_NLD: Tensor, mask_B1QL: Tensor, scale: float, scratch: Scratch
) -> Tensor:
    """o [N, R, D] without autograd. Rows are heads x queries; L a multiple of `key_multiple`."""
    p = probabilities(q_NRD, k_NLD, mask_B1QL, scale, scratch)
    return weighted_values(p, v_NLD, scratch)[:, : q_NRD.shape[1]]
