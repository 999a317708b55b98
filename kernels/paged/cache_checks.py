"""The checks of caches that what reads them and what writes to them share."""

from torch import Tensor

from kernels.cpp.ops import has_key_runs
from kernels.kv_cache import heads_first, keys_in_runs


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
