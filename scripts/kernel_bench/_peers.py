"""Kernels of other libraries, timed where somebody installed them: FlashAttention 2 and 3,
FlashInfer, Liger. None is a dependency, and nothing is imported before a step runs.

Signatures: `flash_attn/flash_attn_interface.py` and `hopper/flash_attn_interface.py` of
Dao-AILab/flash-attention, docs.flashinfer.ai (decode, prefill, norm, activation),
`liger_kernel/transformers/functional.py` of linkedin/Liger-Kernel.
"""

import importlib.util
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

OPTIONAL = {
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "flashinfer": "flashinfer",
    "liger": "liger_kernel",
}
"""Modules by the name of the peer."""
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation asks for
_FLASH_ATTN_PAGE = 256  # FlashAttention 2 takes multiples of it alone


def has(peer: str) -> bool:
    return importlib.util.find_spec(OPTIONAL[peer]) is not None


def absent() -> list[str]:
    """Peers that are not installed here."""
    return [peer for peer in OPTIONAL if not has(peer)]


def varlen_attention(cu: Tensor, length: int) -> dict[str, Callable[..., Tensor]]:
    """Causal attention over packed sequences of at most `length`, with a backward pass."""

    def of(module: str) -> Callable[..., Tensor]:
        def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attend = import_module(module).flash_attn_varlen_func
            out = attend(q, k, v, cu, cu, length, length, causal=True)
            return out[0] if isinstance(out, tuple) else out  # FlashAttention 3 may add lse

        return op

    return {peer: of(OPTIONAL[peer]) for peer in ("flash-attn", "flash-attn-3") if has(peer)}


def paged_decode(
    q_BHD: Tensor, caches: list[Tensor], tables: Tensor, lens: Tensor
) -> dict[str, Callable[[], object]]:
    """One query a sequence over the pages of `tables`, full to the last."""
    steps: dict[str, Callable[[], object]] = {}
    if has("flash-attn"):
        steps["flash-attn"] = _flash_attn_decode(q_BHD, caches, tables, lens)
    if has("flashinfer"):
        wrapper: list[Any] = []

        def flashinfer() -> object:
            if not wrapper:
                made = _flashinfer("BatchDecodeWithPagedKVCacheWrapper", q_BHD)
                pages, heads = _pages(tables, caches[0]), _heads(q_BHD, caches[0])
                made.plan(*pages, *heads, q_data_type=q_BHD.dtype)
                wrapper.append(made)
            return wrapper[0].run(q_BHD, tuple(caches))

        steps["flashinfer"] = flashinfer
    return steps


def paged_prefill(
    q_THD: Tensor, starts: Tensor, caches: list[Tensor], tables: Tensor
) -> dict[str, Callable[[], object]]:
    """The last queries of sequences whose keys fill the pages of `tables`."""
    if not has("flashinfer"):
        return {}
    wrapper: list[Any] = []

    def flashinfer() -> object:
        if not wrapper:
            made = _flashinfer("BatchPrefillWithPagedKVCacheWrapper", q_THD)
            pages, heads = _pages(tables, caches[0]), _heads(q_THD, caches[0])
            made.plan(starts, *pages, *heads, causal=True, q_data_type=q_THD.dtype)
            wrapper.append(made)
        return wrapper[0].run(q_THD, tuple(caches))

    return {"flashinfer": flashinfer}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = import_module("flashinfer").norm.rmsnorm(x, weight, eps=1e-6)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    out: Tensor = import_module("flashinfer").activation.silu_and_mul(gate_up)
    return out


FLASHINFER: dict[str, Callable[..., Tensor]] = {"rms_norm": rms_norm, "swiglu": swiglu}
"""Forward passes alone: it is a library for inference."""


def _flash_attn_decode(
    q_BHD: Tensor, caches: list[Tensor], tables: Tensor, lens: Tensor
) -> Callable[[], object]:
    """Over the same memory in pages of 256, as it takes no smaller ones."""
    pages = [x.view(-1, _FLASH_ATTN_PAGE, *x.shape[2:]) for x in caches]
    width = tables.shape[1] * caches[0].shape[1] // _FLASH_ATTN_PAGE
    own = torch.randperm(len(tables) * width, device=tables.device).int().view(-1, width)

    def step() -> object:
        attend = import_module("flash_attn").flash_attn_with_kvcache
        return attend(q_BHD.unsqueeze(1), *pages, cache_seqlens=lens, block_table=own, causal=True)

    return step


def _flashinfer(name: str, q: Tensor) -> Any:
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    return getattr(import_module("flashinfer"), name)(workspace, "NHD")


def _pages(tables: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(first entry of each sequence, all entries, keys on each last page)."""
    bounds = torch.arange(0, tables.numel() + 1, tables.shape[1], device=tables.device)
    last = torch.full((len(tables),), cache.shape[1], dtype=torch.int32, device=tables.device)
    return bounds.int(), tables.reshape(-1).int(), last


def _heads(q: Tensor, cache: Tensor) -> tuple[int, int, int, int]:
    """(query heads, key heads, head_dim, page size)."""
    return q.shape[1], cache.shape[2], q.shape[2], cache.shape[1]
