"""Writes new keys and values into the paged cache, whose order `kernels/kv_cache.py` describes.

On a CPU in C++, or in PyTorch (`torch/kv_cache.py`, with the definition, `reshape_and_cache_ref`)
for a cache of fp8 and dtypes that C++ lacks; on a GPU in Triton.
"""

import torch
from torch import Tensor

from kernels.backend import Backend, check_tensors, resolve, use_native, use_triton
from kernels.cpp import paged_ops
from kernels.kv_cache import cache_rows, check_rows, check_slots, head_rows
from kernels.paged.cache_checks import check_caches, check_like

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
        check_slots(slot_mapping_T, v_cache, lowest=-1)
    if use_triton(backend, k_TKD, has_cpp=True):
        check_rows(k_cache)
        resolve(_STORE["triton"])(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T, k_scale, v_scale)
        return
    with torch.no_grad():
        rows = cache_rows(slot_mapping_T, v_cache) if rows is None else rows
        if use_native(backend, k_TKD, v_TKD, k_cache, v_cache):
            paged_ops.store_kv(k_cache, v_cache, k_TKD, v_TKD, rows, head_rows(v_cache))
        else:
            resolve(_STORE["torch"])(k_TKD, v_TKD, (k_cache, v_cache), (k_scale, v_scale), rows)


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
