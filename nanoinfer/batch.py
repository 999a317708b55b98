"""The tensors of one engine step, made once and read by every layer.

Legend: T tokens that run in the step, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoinfer.scheduler import Scheduled


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Sequences one after the other, each with the tokens that it runs in this step."""

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64, where in the cache each token's key and value go
    query_starts: list[int]  # [B + 1]
    seq_lens: list[int]  # [B] keys, the new tokens included
    block_tables: Tensor  # int64 [B, most blocks]; entries past a sequence's end are 0
    sampling_rows: Tensor | None  # int64, rows of T whose logits are sampled; None: all, in order


def make_batch(scheduled: list[Scheduled], block_size: int) -> StepBatch:
    """Pack what the scheduler chose."""
    ids: list[int] = []
    query_starts = [0]
    seq_lens = []
    sampling: list[int] = []
    width = max(len(item.sequence.block_table) for item in scheduled)
    tables = np.zeros((len(scheduled), width), dtype=np.int64)
    for row, item in enumerate(scheduled):
        sequence, end = item.sequence, item.start + item.count
        ids += sequence.tokens[item.start : end]
        query_starts.append(len(ids))
        seq_lens.append(end)
        tables[row, : len(sequence.block_table)] = sequence.block_table
        if item.is_sampling:
            sampling.append(len(ids) - 1)
    counts = np.diff(query_starts)
    rows = np.repeat(np.arange(len(scheduled)), counts)
    ends = np.repeat(np.asarray(seq_lens), counts)
    positions = np.arange(len(ids)) - np.repeat(np.asarray(query_starts[1:]), counts) + ends
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    return StepBatch(
        ids_T=torch.tensor(ids),
        positions_T=torch.from_numpy(positions),
        slots_T=torch.from_numpy(slots),
        query_starts=query_starts,
        seq_lens=seq_lens,
        block_tables=torch.from_numpy(tables),
        sampling_rows=None if len(sampling) == len(ids) else torch.tensor(sampling),
    )
