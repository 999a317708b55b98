"""What tests of the C++ kernels share: threads, fp64 references, a shuffled cache."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels import reshape_and_cache
from kernels.kv_cache import keys_in_runs

DTYPES = [torch.float32, torch.bfloat16]
ORDERS = ("tokens first", "heads first", "runs")
"""Of a paged cache in memory; "runs": heads first, keys in runs."""
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Of a rounding to nearest, relative to the result (fp32: 2 ** -24)."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_close(ours: Tensor, exact: Tensor, fp32_error: float, smallest: float = 1e-30) -> None:
    """The result is exact's rounding to ours' dtype, after an error of fp32 arithmetic relative to
    each element."""
    assert ours.shape == exact.shape and exact.dtype == torch.float64
    relative = fp32_error + (HALF_ULP[ours.dtype] if ours.dtype == torch.bfloat16 else 0)
    off = (ours.double() - exact).abs() - relative * exact.abs() - smallest
    assert off.numel() == 0 or off.max() <= 0, float(off.max())


def bounds(lengths: Sequence[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def split_qkv(
    num_tokens: int, num_kv: int, group: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one product, as a layer makes them: tokens lie further apart than their heads."""
    sizes = [n * head_dim for n in (num_kv * group, num_kv, num_kv)]
    parts = torch.randn(num_tokens, sum(sizes)).to(dtype).split(sizes, -1)
    q, k, v = (x.view(num_tokens, x.shape[1] // head_dim, head_dim) for x in parts)
    assert num_tokens < 2 or not q.is_contiguous()
    return q, k, v


def causal_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: Sequence[int]) -> Tensor:
    """In fp64, sequence by sequence."""
    out = []
    for q, k, v in zip(
        *(x.double().split(list(lengths)) for x in (q_THD, k_TKD, v_TKD)), strict=True
    ):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        p = torch.softmax(scores.masked_fill(future, -math.inf), -1)
        out.append(torch.einsum("hqk,khd->qhd", p, v))
    return torch.cat(out)


def shuffled_cache(
    k_TKD: Tensor, v_TKD: Tensor, lengths: Sequence[int], block_size: int, order: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(k cache, v cache, block tables) in one of ORDERS; keys in runs where blocks are whole runs.
    What is not written is NaN: to read it shows."""
    _, num_kv, head_dim = k_TKD.shape
    counts = [-(-n // block_size) for n in lengths]
    shape = [sum(counts) + 2, block_size, num_kv, head_dim]
    if order != "tokens first":
        shape[1], shape[2] = shape[2], shape[1]
    caches = [torch.full(shape, math.nan, dtype=k_TKD.dtype) for _ in "kv"]
    if order != "tokens first":
        caches = [cache.transpose(1, 2) for cache in caches]
    if order == "runs":
        caches[0] = keys_in_runs(caches[0])
    free = torch.randperm(shape[0]).tolist()
    tables = torch.full((len(lengths), max(counts)), -1)
    slots = []
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[i, :count] = torch.tensor([free.pop() for _ in range(count)])
        slots += [
            int(tables[i, t // block_size]) * block_size + t % block_size for t in range(length)
        ]
    reshape_and_cache(k_TKD, v_TKD, caches[0], caches[1], torch.tensor(slots))
    return caches[0], caches[1], tables
