"""Cache writes and attention over the paged cache."""

from collections.abc import Iterator

import torch
from gate_case import ATTENTION_SHAPES, GateCase

from kernels import paged_attention, paged_attention_decode, reshape_and_cache

FP8 = torch.float8_e4m3fn


def make_caches(shape: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> dict:
    caches = [torch.empty(512, block_size, *shape[1:], dtype=dtype) for _ in "kv"]
    scale = torch.empty(1) if dtype == FP8 else None
    return dict(k_cache=caches[0], v_cache=caches[1], k_scale=scale, v_scale=scale)


def store(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    fused = torch.empty(4096, shape[0] + 2 * shape[1], shape[2], dtype=torch.bfloat16)
    k, v = fused[:, shape[0] : -shape[1]], fused[:, -shape[1] :]
    slots = torch.empty(4096, dtype=torch.int64)
    reshape_and_cache(k, v, slot_mapping_T=slots, **make_caches(shape, 16, dtype), backend="triton")


def query(num_tokens: int, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    return torch.empty(num_tokens, shape[0], shape[2], dtype=dtype)


def attend(
    shape: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    q = query(2048, shape, dtype)
    starts, lens, tables = step_indices(17)
    paged_attention(
        q, query_start_loc=starts, seq_lens=lens, block_tables=tables, max_query_len=512,
        max_seq_len=4096, window=window, sinks=sinks, **make_caches(shape, block_size, dtype),
        backend="triton",
    )  # fmt: skip


def decode(
    shape: tuple[int, int, int],
    num_seqs: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    index_dtype: torch.dtype = torch.int32,
) -> None:
    q = query(num_seqs, shape, dtype)
    _, lens, tables = step_indices(num_seqs, index_dtype)
    paged_attention_decode(
        q, seq_lens=lens, block_tables=tables, max_seq_len=4096, window=window, sinks=sinks,
        **make_caches(shape, block_size, dtype), backend="triton",
    )  # fmt: skip


def step_indices(num_seqs: int, dtype: torch.dtype = torch.int32) -> list[torch.Tensor]:
    shapes = ((num_seqs + 1,), (num_seqs,), (num_seqs, 256))
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


ONE_HEAD_SHAPES = {
    "half-128": (128, 1, 128),
    "half-256": (128, 1, 256),
    "fp32-128": (128, 1, 128),
}
"""All query heads read one key head: their rows no longer fit one tile."""


def cases() -> Iterator[GateCase]:
    memory, merge = ("ld128",), {"_merge_kernel": ()}
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", FP8)):
        shape = ATTENTION_SHAPES["half-128"]
        yield GateCase(f"store_kv-{name}", lambda d=dtype, s=shape: store(s, d), need=memory)
        yield GateCase(
            f"paged_prefill-{name}-block32",
            lambda d=dtype, s=shape: attend(s, 32, d),
            need=("wgmma", "ld128"),
        )
        yield GateCase(
            f"paged_decode-{name}-block32",
            lambda d=dtype, s=shape: decode(s, 256, 32, d),
            need=memory,
        )
    shape = ATTENTION_SHAPES["half-128"]
    for num_seqs in (4, 256):  # from the buffers of a CUDA graph, which are int64
        yield GateCase(
            f"paged_decode-graph-{num_seqs}",
            lambda n=num_seqs: decode(shape, n, 16, torch.bfloat16, index_dtype=torch.int64),
            need=memory,
            need_of=merge,
        )
    one_head = {f"{name}-one_head": shape for name, shape in ONE_HEAD_SHAPES.items()}
    for name, shape in (ATTENTION_SHAPES | one_head).items():
        is_fp32 = name.startswith("fp32")
        dtype = torch.float32 if is_fp32 else torch.bfloat16
        yield GateCase(
            f"paged_prefill-{name}",
            lambda s=shape, d=dtype: attend(s, 16, d),
            need=memory if is_fp32 else ("wgmma", "ld128"),
        )
        yield GateCase(
            f"paged_decode-{name}-split",
            lambda s=shape, d=dtype: decode(s, 4, 16, d),
            need=memory,
            need_of=merge,
        )
    for name, shape in ATTENTION_SHAPES.items():
        is_fp32 = name.startswith("fp32")
        dtype = torch.float32 if is_fp32 else torch.bfloat16
        yield GateCase(
            f"paged_prefill-window-{name}",
            lambda s=shape, d=dtype: attend(s, 16, d, 1024),
            need=memory if is_fp32 else ("wgmma", "ld128"),
        )
        yield GateCase(
            f"paged_decode-window-{name}-split",
            lambda s=shape, d=dtype: decode(s, 4, 16, d, 1024),
            need=memory,
            need_of=merge,
        )
    shape = ATTENTION_SHAPES["half-64"]  # gpt-oss: heads of 64
    for window in (None, 128):
        name = "sinks" if window is None else "sinks-window"
        yield GateCase(
            f"paged_prefill-{name}",
            lambda w=window: attend(shape, 16, torch.bfloat16, w, torch.empty(shape[0])),
            need=("wgmma", "ld128"),
        )
        yield GateCase(
            f"paged_decode-{name}-split",
            lambda w=window: decode(shape, 4, 16, torch.bfloat16, w, torch.empty(shape[0])),
            need=memory,
            need_of=merge,
        )
