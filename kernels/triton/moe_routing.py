"""Triton kernels of `moe_routing`: top-k of a softmax, and a stable counting sort by expert.

The sort takes three launches and no atomics: every run of slots counts its experts, each expert
adds the counts up over the runs, and every run writes its slots to the places that are then known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch

_TILE_ELEMENTS = 8192  # of a [slots, experts] tile: 64 registers a thread on 4 warps
_TOPK_ELEMENTS = 2048  # the same, where several such tiles live at a time
_RUNS = 1024  # that a program adds up at a time
_TILES_A_PROGRAM = 32


@triton.jit
def _topk_kernel(
    logits_ptr, weight_ptr, id_ptr, num_rows, num_experts, TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    expert = tl.arange(0, EXPERTS)
    mask = is_row[:, None] & (expert < num_experts)[None, :]
    place = row[:, None] * num_experts + expert[None, :]
    z = tl.load(logits_ptr + place, mask, other=-float("inf")).to(tl.float32)
    z = tl.where(is_row[:, None], z, 0.0)
    e = tl.exp(z - tl.max(z, 1)[:, None])
    p = tl.div_rn(e, tl.zeros_like(e) + tl.sum(e, 1)[:, None])
    left = tl.where((expert < num_experts)[None, :], p, -1.0)
    choice = tl.arange(0, CHOICES)
    weights = tl.zeros([ROWS, CHOICES], dtype=tl.float32)
    ids = tl.zeros([ROWS, CHOICES], dtype=tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(left, 1)
        hits = tl.where(left == best[:, None], expert[None, :], num_experts - 1)
        chosen = tl.min(hits, 1)  # the lower expert of equals; NaN finds none and takes the last
        left = tl.where(expert[None, :] == chosen[:, None], -1.0, left)
        weights = tl.where(choice[None, :] == j, best[:, None], weights)
        ids = tl.where(choice[None, :] == j, chosen[:, None], ids)
    if RENORMALIZE:
        weights = tl.div_rn(weights, tl.zeros_like(weights) + tl.sum(weights, 1)[:, None])
    place = row[:, None] * TOP_K + choice[None, :]
    mask = is_row[:, None] & (choice < TOP_K)[None, :]
    tl.store(weight_ptr + place, weights, mask)
    tl.store(id_ptr + place, ids, mask)


@triton.jit
def _topk_backward_kernel(
    dweight_ptr, logits_ptr, weight_ptr, id_ptr, dlogits_ptr, num_rows, num_experts,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    is_row = row < num_rows
    mask = is_row[:, None] & (expert < num_experts)[None, :]
    place = row[:, None] * num_experts + expert[None, :]
    total = tl.zeros([ROWS], dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weight_ptr + row * TOP_K + j, is_row, other=0.0)
        total += weight * tl.load(dweight_ptr + row * TOP_K + j, is_row, other=0.0)
    if RENORMALIZE:
        dz = tl.zeros([ROWS, EXPERTS], dtype=tl.float32)
    else:
        z = tl.load(logits_ptr + place, mask, other=-float("inf")).to(tl.float32)
        z = tl.where(is_row[:, None], z, 0.0)
        e = tl.exp(z - tl.max(z, 1)[:, None])
        dz = -(e / tl.sum(e, 1)[:, None]) * total[:, None]
    for j in tl.static_range(TOP_K):
        chosen = tl.load(id_ptr + row * TOP_K + j, is_row, other=0)
        weight = tl.load(weight_ptr + row * TOP_K + j, is_row, other=0.0)
        slope = tl.load(dweight_ptr + row * TOP_K + j, is_row, other=0.0)
        if RENORMALIZE:
            slope -= total
        dz += tl.where(expert[None, :] == chosen[:, None], (weight * slope)[:, None], 0.0)
    tl.store(dlogits_ptr + place, dz.to(dlogits_ptr.dtype.element_ty), mask)


@triton.jit
def _count_kernel(
    id_ptr, count_ptr, num_slots, num_experts, SLOTS: tl.constexpr, EXPERTS: tl.constexpr
):
    run = tl.program_id(0)
    slot = run * SLOTS + tl.arange(0, SLOTS)
    expert = tl.arange(0, EXPERTS)
    ids = tl.load(id_ptr + slot, slot < num_slots, other=-1).to(tl.int32)
    hits = (ids[:, None] == expert[None, :]).to(tl.int32)
    place = count_ptr + run.to(tl.int64) * num_experts + expert
    tl.store(place, tl.sum(hits, 0), expert < num_experts)


@triton.jit
def _scan_kernel(count_ptr, total_ptr, num_runs, num_experts, RUNS: tl.constexpr):
    expert = tl.program_id(0)
    total = expert * 0
    for start in range(0, num_runs, RUNS):
        run = start + tl.arange(0, RUNS)
        place = count_ptr + run.to(tl.int64) * num_experts + expert
        count = tl.load(place, run < num_runs, other=0)
        tl.store(place, total + tl.cumsum(count, 0) - count, run < num_runs)
        total += tl.sum(count, 0)
    tl.store(total_ptr + expert, total)


@triton.jit
def _scatter_kernel(
    id_ptr, before_ptr, total_ptr, slot_ptr, offset_ptr, num_slots, num_experts,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    slot = run * SLOTS + tl.arange(0, SLOTS)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    total = tl.load(total_ptr + expert, is_expert, other=0)
    ends = tl.cumsum(total, 0)
    before = before_ptr + run.to(tl.int64) * num_experts + expert
    first = ends - total + tl.load(before, is_expert, other=0)
    ids = tl.load(id_ptr + slot, slot < num_slots, other=-1).to(tl.int32)
    is_hit = ids[:, None] == expert[None, :]
    rank = tl.cumsum(is_hit.to(tl.int32), 0) - 1 + first[None, :]
    place = tl.sum(tl.where(is_hit, rank, 0), 1)
    tl.store(slot_ptr + place, slot, slot < num_slots)
    if run == 0:
        tl.store(offset_ptr + expert + 1, ends, is_expert)
        tl.store(offset_ptr + expert, ends * 0, expert == 0)


@triton.jit
def _tiles_kernel(
    offset_ptr, tile_expert_ptr, tile_start_ptr, num_tiles, num_experts,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    start = tl.load(offset_ptr + expert, is_expert, other=0).to(tl.int32)
    end = tl.load(offset_ptr + expert + 1, is_expert, other=0).to(tl.int32)
    count = (end - start + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(count, 0)
    mine = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
    row = (start - (last - count) * BLOCK_M)[None, :] + tile[:, None] * BLOCK_M
    row = tl.sum(tl.where(expert[None, :] == mine[:, None], row, 0), 1)
    is_used = mine < num_experts
    tl.store(tile_expert_ptr + tile, tl.where(is_used, mine, -1), tile < num_tiles)
    tl.store(tile_start_ptr + tile, tl.where(is_used, row, 0), tile < num_tiles)


def _blocks(
    num_experts: int, most_rows: int = 64, elements: int = _TILE_ELEMENTS
) -> tuple[int, int]:
    """(rows, padded experts) of a tile that fits the registers."""
    experts = max(16, triton.next_power_of_2(num_experts))
    return max(1, min(most_rows, elements // experts)), experts


def topk_softmax(logits_NE: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    logits_NE = logits_NE.contiguous()
    num_rows, num_experts = logits_NE.shape
    weights = torch.empty(num_rows, k, dtype=torch.float32, device=logits_NE.device)
    ids = torch.empty(num_rows, k, dtype=torch.int32, device=logits_NE.device)
    rows, experts = _blocks(num_experts, 16, _TOPK_ELEMENTS)
    if num_rows:
        launch(_topk_kernel, (triton.cdiv(num_rows, rows),))(
            logits_NE, weights, ids, num_rows, num_experts,
            TOP_K=k, RENORMALIZE=renormalize, ROWS=rows, EXPERTS=experts,
            CHOICES=triton.next_power_of_2(k),
        )  # fmt: skip
    return weights, ids


def topk_softmax_backward(
    dweights_NK: Tensor, logits_NE: Tensor, weights_NK: Tensor, ids_NK: Tensor, renormalize: bool
) -> Tensor:
    logits_NE = logits_NE.contiguous()
    num_rows, num_experts = logits_NE.shape
    dlogits = torch.empty_like(logits_NE)
    rows, experts = _blocks(num_experts, 16, _TOPK_ELEMENTS)
    if num_rows:
        launch(_topk_backward_kernel, (triton.cdiv(num_rows, rows),))(
            dweights_NK.contiguous(), logits_NE, weights_NK, ids_NK, dlogits, num_rows,
            num_experts, TOP_K=ids_NK.shape[1], RENORMALIZE=renormalize, ROWS=rows,
            EXPERTS=experts,
        )  # fmt: skip
    return dlogits


def moe_align(
    topk_ids_NK: Tensor, num_experts: int, block_m: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(slots, offsets, tile_experts, tile_starts), all int32."""
    ids = topk_ids_NK.contiguous()
    num_slots, device = ids.numel(), ids.device
    slots_a_run, experts = _blocks(num_experts)
    num_runs = max(1, triton.cdiv(num_slots, slots_a_run))
    counts = torch.empty(num_runs, num_experts, dtype=torch.int32, device=device)
    totals = torch.empty(num_experts, dtype=torch.int32, device=device)
    slots = torch.empty(num_slots, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    launch(_count_kernel, (num_runs,))(
        ids, counts, num_slots, num_experts, SLOTS=slots_a_run, EXPERTS=experts
    )
    launch(_scan_kernel, (num_experts,))(
        counts, totals, num_runs, num_experts, RUNS=min(_RUNS, triton.next_power_of_2(num_runs))
    )
    launch(_scatter_kernel, (num_runs,))(
        ids, counts, totals, slots, offsets, num_slots, num_experts,
        SLOTS=slots_a_run, EXPERTS=experts,
    )  # fmt: skip
    return slots, offsets, *cut_tiles(offsets, num_slots, block_m)


def cut_tiles(offsets: Tensor, num_rows: int, block_m: int) -> tuple[Tensor, Tensor]:
    """(tile_experts, tile_starts) of the runs that `offsets` bounds."""
    num_experts = offsets.shape[0] - 1
    # No split of the rows among the experts needs more.
    num_tiles = num_rows // block_m + min(num_rows, num_experts)
    tile_experts, tile_starts = (
        torch.empty(num_tiles, dtype=torch.int32, device=offsets.device) for _ in range(2)
    )
    if num_tiles:
        launch(_tiles_kernel, (triton.cdiv(num_tiles, _TILES_A_PROGRAM),))(
            offsets, tile_experts, tile_starts, num_tiles, num_experts,
            BLOCK_M=block_m, EXPERTS=max(16, triton.next_power_of_2(num_experts)),
            TILES=_TILES_A_PROGRAM,
        )  # fmt: skip
    return tile_experts, tile_starts
