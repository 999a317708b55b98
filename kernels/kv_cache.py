"""Writes new keys and values into the paged cache.

A cache is [blocks, block_size, key heads, head_dim]; slot s is row s % block_size of block
s // block_size. Allocate caches with zeros: attention multiplies unwritten rows by weight 0, and
0 · NaN is NaN.
"""

import torch
from torch import Tensor

from kernels._check import check_tensors
from kernels._dispatch import Backend, use_triton


def reshape_and_cache_ref(
    k_TKD: Tensor, v_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor
) -> None:
    """The definition, token by token."""
    for t, slot in enumerate(slot_mapping_T.tolist()):
        if slot >= 0:
            k_cache[slot // k_cache.shape[1], slot % k_cache.shape[1]] = k_TKD[t]
            v_cache[slot // v_cache.shape[1], slot % v_cache.shape[1]] = v_TKD[t]


def reshape_and_cache(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    backend: Backend = "auto",
    debug: bool = False,
) -> None:
    """Stores each token's k and v at its slot, in place; a slot of −1 skips the token.

    With `k_scale`, `v_scale` (one fp32 element each) the caches are fp8 and hold k / k_scale and
    v / v_scale, rounded to nearest and saturated. On a CPU slots are taken as they are (no −1), to
    save a pass over them in every layer. `debug` reads the slots back and checks their range.
    """
    _check(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T, k_scale, v_scale)
    if debug:
        _check_slots(slot_mapping_T, k_cache)
    if use_triton(backend, k_TKD):
        from kernels import _kv_cache_triton

        _kv_cache_triton.store(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T, k_scale, v_scale)
        return
    with torch.no_grad():
        for x_TKD, cache, scale in ((k_TKD, k_cache, k_scale), (v_TKD, v_cache, v_scale)):
            if scale is None:
                cache.flatten(0, 1).index_copy_(0, slot_mapping_T, x_TKD)
            else:  # as bytes: PyTorch has no index_copy_ of fp8
                bits = quantised(x_TKD, scale, cache.dtype).view(torch.uint8)
                cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slot_mapping_T, bits)


def quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale, saturated, in fp8."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


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
    if k_cache.shape != v_cache.shape or k_cache.shape[2:] != k.shape[1:]:
        raise ValueError(
            f"k_cache: shape {tuple(k_cache.shape)} must be v_cache's {tuple(v_cache.shape)} and "
            f"end in k's {tuple(k.shape[1:])}"
        )
    check_tensors(k, "k", False, v=v, k_scale=k_scale, v_scale=v_scale)
    if v.dtype != k.dtype:
        raise ValueError(f"v: dtype {v.dtype} must be k's {k.dtype}")
    if slots.device != k.device or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slot_mapping: {slots.dtype} on {slots.device}; integers on {k.device}")
    is_fp8 = k_cache.dtype.itemsize == 1
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.device != k.device or not cache.is_contiguous():
            raise ValueError(f"{name}: must be contiguous and on {k.device}, is on {cache.device}")
        if cache.dtype != (k_cache.dtype if is_fp8 else k.dtype):
            raise ValueError(f"{name}: dtype {cache.dtype}, must be k's {k.dtype} or fp8")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != is_fp8 or (scale is not None and scale.numel() != 1):
            raise ValueError(f"{name}: one fp32 element for a cache of fp8, None for any other")


def _check_slots(slots: Tensor, cache: Tensor) -> None:
    num_slots = cache.shape[0] * cache.shape[1]
    for t, slot in enumerate(slots.tolist()):
        if not -1 <= slot < num_slots:
            raise ValueError(f"slot_mapping[{t}]={slot}: must be -1 or below {num_slots}")
