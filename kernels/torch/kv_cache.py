"""Writing into the paged cache in PyTorch: the definition, caches of fp8, keys in runs, and what
kv_cache.py does where there is no C++.
"""

import torch
from torch import Tensor

from kernels.cpp.ops import has_key_runs
from kernels.kv_cache import head_rows, heads_first, index_dtype


def reshape_and_cache_ref(
    k_TKD: Tensor, v_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor
) -> None:
    """The definition, token by token."""
    for t, slot in enumerate(slot_mapping_T.tolist()):
        if slot >= 0:
            k_cache[slot // k_cache.shape[1], slot % k_cache.shape[1]] = k_TKD[t]
            v_cache[slot // v_cache.shape[1], slot % v_cache.shape[1]] = v_TKD[t]


def store(
    k_TKD: Tensor,
    v_TKD: Tensor,
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    rows_T: Tensor,
) -> None:
    """Each token's k and v to its rows of the caches, of k and of v."""
    rows = (rows_T.unsqueeze(1) + torch.arange(k_TKD.shape[1]) * head_rows(caches[1])).flatten()
    for x_TKD, cache, scale in zip((k_TKD, v_TKD), caches, scales, strict=True):
        if has_key_runs(cache):
            _store_in_runs(cache, rows, x_TKD.flatten(0, 1))
            continue
        if scale is not None:
            bits = index_dtype(cache.dtype)
            x_TKD = quantised(x_TKD, scale, cache.dtype).view(bits)
            cache = cache.view(bits)
        ordered = cache if cache.is_contiguous() else heads_first(cache)
        ordered.view(-1, cache.shape[3]).index_copy_(0, rows, x_TKD.flatten(0, 1))


def key_rows(k_cache: Tensor) -> Tensor:
    """Keys as [blocks, block_size, K, D], heads first; a copy of all where they lie in runs."""
    if not has_key_runs(k_cache):
        return k_cache
    rows = _keys_of_runs(k_cache).contiguous()
    return rows.flatten(4).flatten(2, 3).transpose(1, 2)


def _keys_of_runs(k_cache: Tensor) -> Tensor:
    """The same memory as [blocks, K, runs, keys of a run, words, elements of a word]."""
    return k_cache.transpose(3, 4)


def _store_in_runs(k_cache: Tensor, rows: Tensor, keys: Tensor) -> None:
    """Keys [N, D] to those rows, counted heads first."""
    places = _keys_of_runs(k_cache)
    places[torch.unravel_index(rows, places.shape[:4])] = keys.view(-1, *places.shape[4:])


def quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale, saturated, in fp8."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)
