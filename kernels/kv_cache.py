"""Writes new keys and values into the paged cache.

A cache is [blocks, block_size, key heads, head_dim]; slot s is row s % block_size of block
s // block_size. Allocate caches with zeros: attention multiplies unwritten rows by weight 0, and
0 · NaN is NaN.
"""

import torch
from torch import Tensor

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
    *,
    backend: Backend = "auto",
) -> None:
    """Stores each token's k and v at its slot, in place; a slot of −1 skips the token.

    On a CPU slots are taken as they are (no −1), to save a pass over them in every layer.
    """
    if k_TKD.shape != v_TKD.shape or slot_mapping_T.shape != k_TKD.shape[:1]:
        raise ValueError(
            f"slot_mapping: shape {tuple(slot_mapping_T.shape)} must be the tokens of k "
            f"{tuple(k_TKD.shape)} and v {tuple(v_TKD.shape)}"
        )
    if k_cache.shape != v_cache.shape or k_cache.shape[2:] != k_TKD.shape[1:]:
        raise ValueError(
            f"k_cache: shape {tuple(k_cache.shape)} must be v_cache's {tuple(v_cache.shape)} and "
            f"end in k's {tuple(k_TKD.shape[1:])}"
        )
    if use_triton(backend, k_TKD):
        from kernels import _paged_attention_triton

        _paged_attention_triton.store(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T)
        return
    with torch.no_grad():
        k_cache.flatten(0, 1).index_copy_(0, slot_mapping_T, k_TKD)
        v_cache.flatten(0, 1).index_copy_(0, slot_mapping_T, v_TKD)
