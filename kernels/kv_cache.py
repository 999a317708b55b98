"""Writes new keys and values into the paged cache.

A cache is [blocks, block_size, key heads, head_dim]; slot s is row s % block_size of block
s // block_size. `make_kv_cache` allocates it in the order that its device's kernels read fastest.
Where C++ attends, `keys_in_runs` says how that memory is to hold keys: as scoring multiplies them,
so that no step lays them out again. Values stay rows, and rows are counted in their cache. Every
function takes keys of either order.

Left out: the definition, fp8 and the way without C++ (`torch/kv_cache.py`).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import Backend, check_tensors, resolve, use_native, use_triton
from kernels.cpp import ops as cpp_ops
from kernels.cpp.ops import has_key_runs
from kernels.memory import fresh_pages

# "triton" takes slots, "torch" the rows that they are
_STORE = {"triton": "kernels.triton.kv_cache:store", "torch": "kernels.torch.kv_cache:store"}


def reshape_and_cache(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    backend: Backend = "auto",
    debug: bool = False,
) -> None:
    """Stores each token's k and v at its slot, in place; a slot of −1 skips the token.

    With `k_scale`, `v_scale` (one fp32 element each) the caches are fp8 and hold k / k_scale and
    v / v_scale, rounded to nearest and saturated. On a CPU slots are taken as they are (no −1), to
    save a pass over them in every layer; `rows` is `cache_rows` of them (which checks their range),
    for all layers to share.
    `debug` reads the slots back and checks their range.
    """
    _check(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T, k_scale, v_scale)
    if debug:
        _check_slots(slot_mapping_T, v_cache, lowest=-1)
    if use_triton(backend, k_TKD, has_cpp=True):
        check_rows(k_cache)
        resolve(_STORE["triton"])(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T, k_scale, v_scale)
        return
    with torch.no_grad():
        rows = cache_rows(slot_mapping_T, v_cache) if rows is None else rows
        if use_native(backend, k_TKD, v_TKD, k_cache, v_cache):
            cpp_ops.store_kv(k_cache, v_cache, k_TKD, v_TKD, rows, head_rows(v_cache))
        else:
            resolve(_STORE["torch"])(k_TKD, v_TKD, (k_cache, v_cache), (k_scale, v_scale), rows)


def make_kv_cache(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros [..., blocks, block_size, K, D]. On a CPU they lie heads first in memory,
    [..., blocks, K, block_size, D]: what attention reads of a block for one head is one piece.

    Zeros, because attention multiplies what is not yet written by a weight of 0. On a CPU they
    come from the operating system, page by page as blocks are first used.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(tuple(shape), dtype=index_dtype(dtype), device=device).view(dtype)
    *before, block_size, num_kv, head_dim = shape
    raw = fresh_pages(math.prod(shape) * dtype.itemsize)
    data = raw.view(dtype).view(*before, num_kv, block_size, head_dim)
    return data.transpose(-3, -2)


def keys_in_runs(cache: Tensor) -> Tensor:
    """The memory of a layer's cache, not yet written, for keys that lie as C++ multiplies them:
    [blocks, K, runs, words, keys of a run, elements of a word]. A run is as many consecutive keys
    as the processor has lanes, a word the elements that it multiplies at once.

    The cache itself where keys stay rows: another dtype than C++'s or no compiler, another device,
    an order other than `make_kv_cache`'s, blocks that are not whole runs, heads not whole words."""
    if not use_native("auto", cache) or not heads_first(cache).is_contiguous():
        return cache
    num_blocks, block_size, num_kv, head_dim = cache.shape
    num_keys, per_word = cpp_ops.run_shape(cache.dtype)
    if block_size % num_keys or head_dim % per_word:
        return cache
    runs, words = block_size // num_keys, head_dim // per_word
    return heads_first(cache).view(num_blocks, num_kv, runs, words, num_keys, per_word)


def index_dtype(dtype: torch.dtype) -> torch.dtype:
    """As what elements are filled and copied: PyTorch lacks such ops of fp8, so that as bytes."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def heads_first(cache: Tensor) -> Tensor:
    """The same cache as [blocks, K, block_size, D]; contiguous where `make_kv_cache` made it."""
    return cache.transpose(1, 2)


def is_cache_order(cache: Tensor) -> bool:
    """True if it lies in memory as its device's kernels expect."""
    return cache.is_contiguous() or (
        cache.device.type == "cpu" and heads_first(cache).is_contiguous()
    )


def check_like(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises unless two caches hold as much, in one order, keys in runs or not."""
    if has_key_runs(k_cache):
        expected = keys_in_runs(v_cache).shape
        if k_cache.shape != expected or not k_cache.is_contiguous():
            raise ValueError(
                f"k_cache: keys in runs {tuple(k_cache.shape)} must be keys_in_runs of a cache "
                f"like v_cache, {tuple(expected)}"
            )
        return
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache: shape {tuple(k_cache.shape)} must be v_cache's {tuple(v_cache.shape)}, "
            "[blocks, size, heads, head_dim]"
        )
    if k_cache.is_contiguous() != v_cache.is_contiguous():
        raise ValueError("v_cache: must lie in memory in k_cache's order; see make_kv_cache")


def check_rows(cache: Tensor) -> None:
    """Raises for a cache of keys in runs where rows are to be counted or, by Triton, read."""
    if has_key_runs(cache):
        raise ValueError(
            "cache: keys in runs have no rows; to count rows give the layer's cache of values, to "
            "Triton keys as make_kv_cache laid them"
        )


def head_rows(cache: Tensor) -> int:
    """How far apart a token's heads lie in a CPU's cache seen as rows of D."""
    return 1 if cache.is_contiguous() else cache.shape[1]


def cache_rows(slots_T: Tensor, cache: Tensor) -> Tensor:
    """Where each token's first head lies in a CPU's cache seen as rows of D, [T] int64. `cache` is
    any layer's values; where keys do not lie in runs, any layer's keys do as well."""
    check_rows(cache)
    _check_slots(slots_T, cache)
    block_size, num_kv = cache.shape[1:3]
    slots_T = slots_T.to(torch.int64)
    if cache.is_contiguous():
        return slots_T * num_kv
    block = slots_T.div(block_size, rounding_mode="floor")
    return slots_T + block * ((num_kv - 1) * block_size)


def _check(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    if k.shape != v.shape or slots.shape != k.shape[:1]:
        raise ValueError(
            f"slot_mapping: shape {tuple(slots.shape)} must be the tokens of k {tuple(k.shape)} "
            f"and v {tuple(v.shape)}"
        )
    check_like(k_cache, v_cache)
    if v_cache.shape[2:] != k.shape[1:]:
        raise ValueError(
            f"k_cache: shape {tuple(v_cache.shape)} must end in k's {tuple(k.shape[1:])}"
        )
    check_tensors(k, "k", False, v=v, k_scale=k_scale, v_scale=v_scale)
    if v.dtype != k.dtype:
        raise ValueError(f"v: dtype {v.dtype} must be k's {k.dtype}")
    if slots.device != k.device or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slot_mapping: {slots.dtype} on {slots.device}; integers on {k.device}")
    check_caches("k", k, (k_cache, v_cache), (k_scale, v_scale))


def check_caches(
    name: str,
    x: Tensor,
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
) -> None:
    """Caches (of k, of v) that lie beside `x` in their order and have its dtype, or fp8's and
    scales."""
    is_fp8 = caches[0].dtype.itemsize == 1
    for cache_name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        if cache.device != x.device or not is_cache_order(cache):
            raise ValueError(
                f"{cache_name}: must be contiguous and on {x.device}, is on {cache.device}"
            )
        if cache.dtype != (caches[0].dtype if is_fp8 else x.dtype):
            raise ValueError(
                f"{cache_name}: dtype {cache.dtype}, must be {name}'s {x.dtype} or fp8"
            )
    for scale_name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if (scale is not None) != is_fp8 or (scale is not None and scale.numel() != 1):
            raise ValueError(
                f"{scale_name}: one fp32 element for a cache of fp8, None for any other"
            )


def _check_slots(slots: Tensor, cache: Tensor, lowest: int = 0) -> None:
    num_slots = cache.shape[0] * cache.shape[1]
    is_bad = (slots < lowest) | (slots >= num_slots)
    if is_bad.any():
        t = int(is_bad.nonzero()[0])
        raise ValueError(
            f"slot_mapping[{t}]={int(slots[t])}: must be at least {lowest} and below {num_slots}"
        )
