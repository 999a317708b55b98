"""A step as arrays. Rows are updated as sequences grow, so a step costs no pass over tokens.

A running sequence owns one row of every array from admission to its end: block table, last token,
sampling parameters. `build` gathers the rows of a step into what the model runner feeds.

Legend: T tokens of the step, S sequences of the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from nanoinfer.gpu.device_sampler import DeviceSampling
from nanoinfer.sampler import SamplingBatch
from nanoinfer.scheduler import Step
from nanoinfer.sequence import Sequence


@dataclass(frozen=True)
class StepInput:
    """One forward pass. `sampled` are the positions in T whose logits are wanted, None for all: the
    last of a sequence whose tokens are all computed then, and its drafts. `sampling` has one entry
    for each of them.

    Two decodes at positions 10 and 7, in blocks of 4: `ids_T=[5, 9]`, `positions_T=[10, 7]`,
    `slots_T=[14, 23]`, `query_starts=[0, 1, 2]`, `seq_lens=[11, 8]`,
    `block_tables=[[0, 1, 3], [4, 5, 0]]` (padded), `sampled=None`.

    As it is built its tensors are the CPU's; the runner sends them to a GPU all at once, with what
    only a GPU needs: `static` and `drawing`."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    query_starts: list[int]  # [S + 1]
    seq_lens: list[int]  # [S], keys, new tokens included
    starts: Tensor  # `query_starts` and `seq_lens` again, int32, for kernels to read
    lens: Tensor
    block_tables: Tensor  # [S, blocks]
    copies: Tensor | None  # [copies, 2], from block to block
    sampled: Tensor | None
    sampling: SamplingBatch
    scored: Scored | None = None
    static: StaticRows | None = None
    drawing: DeviceSampling | None = None
    adapter_rows: dict[str, Tensor] = field(default_factory=dict)  # in T, of each adapter


@dataclass(frozen=True)
class Scored:
    """Prompt tokens whose log-probs are wanted, one entry each, like temperatures together."""

    rows: Tensor  # in T, whose hidden state predicts the token
    ids: Tensor
    spans: list[tuple[float, int, int]]  # temperature, and its entries [lo, hi)
    order: list[int]  # the place of each entry in the order of the step
    ranked: Ranked | None = None  # those that want the likeliest tokens too


@dataclass(frozen=True)
class Ranked:
    """The scored entries whose likeliest tokens are wanted, too."""

    rows: Tensor  # as `Scored.rows`
    spans: list[tuple[float, int, int]]
    order: list[int]
    counts: list[int]  # of likeliest tokens


@dataclass(frozen=True)
class StaticRows:
    """A decode step, padded with sequences of one token to a size that has a graph."""

    rows: Tensor  # [4, size]: ids, positions, slots, lengths
    tables: Tensor  # [size, blocks]


class Batch:
    """The rows of all running sequences."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._temperatures = np.zeros(max_num_seqs)
        self._top_ks = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_ps = np.ones(max_num_seqs)
        self._min_ps = np.zeros(max_num_seqs)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)

    def build(self, step: Step) -> StepInput:
        """The arrays of a scheduled step."""
        for seq in step.seqs:
            self._refresh(seq)
        rows = np.array([seq.row for seq in step.seqs])
        counts = np.array(step.num_scheduled_tokens)
        first = np.array([seq.num_computed_tokens for seq in step.seqs])
        ends = counts.cumsum()
        of_seq = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + first[of_seq]
        blocks = self._tables[rows[of_seq], positions // self.block_size]
        lens = first + counts
        num_drafts = np.array([len(seq.drafts) for seq in step.seqs])
        is_last = lens - num_drafts == np.array([len(seq.ids) for seq in step.seqs])
        num_sampled = np.where(is_last, num_drafts + 1, 0)
        sampled = np.flatnonzero(np.arange(ends[-1]) >= np.repeat(ends - num_sampled, counts))
        width = -(-int(lens.max()) // self.block_size)
        return StepInput(
            ids_T=torch.tensor(_new_ids(step), dtype=torch.int64),
            positions_T=torch.from_numpy(positions),
            slots_T=torch.from_numpy(blocks * self.block_size + positions % self.block_size),
            query_starts=[0, *ends.tolist()],
            seq_lens=lens.tolist(),
            starts=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            lens=torch.from_numpy(lens.astype(np.int32)),
            block_tables=torch.from_numpy(self._tables[rows, :width]),
            copies=torch.tensor(step.copies) if step.copies else None,
            sampled=None if len(sampled) == ends[-1] else torch.from_numpy(sampled),
            sampling=self._sampling([step.seqs[i] for i in of_seq[sampled]], positions[sampled]),
            scored=_scored(step),
            adapter_rows=_adapter_rows(step, of_seq),
        )

    def _refresh(self, seq: Sequence) -> None:
        """Bring the row of `seq` up to date: usually nothing, sometimes one more block."""
        row, num_blocks = seq.row, len(seq.block_table)
        if seq.num_blocks_in_row == 0:  # newly admitted
            self._temperatures[row] = seq.params.temperature
            self._top_ks[row] = seq.params.top_k
            self._top_ps[row] = seq.params.top_p
            self._min_ps[row] = seq.params.min_p
            self._seeds[row] = seq.params.seed & 0xFFFFFFFFFFFFFFFF
        if seq.num_blocks_in_row != num_blocks:
            self._tables[row, seq.num_blocks_in_row : num_blocks] = seq.block_table[
                seq.num_blocks_in_row :
            ]
            seq.num_blocks_in_row = num_blocks

    def _sampling(self, seqs: list[Sequence], positions: np.ndarray) -> SamplingBatch:
        """`seqs` has the sequence of each sampled position."""
        rows = np.array([seq.row for seq in seqs], dtype=np.int64)
        return SamplingBatch(
            temperatures=self._temperatures[rows],
            top_ks=self._top_ks[rows],
            top_ps=self._top_ps[rows],
            seeds=self._seeds[rows],
            positions=positions + 1,
            min_ps=self._min_ps[rows],
            edits={i: seq.edits for i, seq in enumerate(seqs) if seq.edits is not None},
            num_top={i: seq.params.top_logps for i, seq in enumerate(seqs) if seq.params.top_logps},
            raw_rows=[i for i, seq in enumerate(seqs) if seq.params.logps_mode == "raw"],
        )


def _new_ids(step: Step) -> Rows[int]:
    ids: list[int] = []
    for seq, num_new in zip(step.seqs, step.num_scheduled_tokens, strict=True):
        if num_new == 1:
            ids.append(seq.ids[seq.num_computed_tokens])
        else:
            ids += seq.ids[seq.num_computed_tokens : seq.num_computed_tokens + num_new]
            ids += seq.drafts
    return ids


def _adapter_rows(step: Step, of_seq: np.ndarray) -> dict[str, Tensor]:
    """The rows of each adapter in the step; `of_seq` has the sequence of each row."""
    names = [seq.params.adapter for seq in step.seqs]
    if not any(names):
        return {}
    of_row = np.array(names)[of_seq]
    return {
        name: torch.from_numpy(np.flatnonzero(of_row == name))
        for name in dict.fromkeys(names)
        if name
    }


def _scored(step: Step) -> Scored | None:
    found: list[tuple[float, int, int, int, int]] = []  # temperature, place, row, id, likeliest
    start = 0
    for seq, num_new in zip(step.seqs, step.num_scheduled_tokens, strict=True):
        for position in seq.unscored(num_new):
            row = start + position - seq.num_computed_tokens
            next_id, params = seq.ids[position + 1], seq.params
            found.append((params.logps_temperature, len(found), row, next_id, params.top_logps))
        start += num_new
    if not found:
        return None
    found.sort()
    temperatures, order, rows, ids, counts = (list(column) for column in zip(*found, strict=True))
    asked = [i for i, count in enumerate(counts) if count]
    ranked = None
    if asked:
        ranked = Ranked(
            torch.tensor([rows[i] for i in asked]),
            _spans([temperatures[i] for i in asked]),
            [order[i] for i in asked],
            [counts[i] for i in asked],
        )
    return Scored(torch.tensor(rows), torch.tensor(ids), _spans(temperatures), order, ranked)


def _spans(temperatures: list[float]) -> list[tuple[float, int, int]]:
    """Runs of equal temperatures: (temperature, first, behind the last)."""
    spans = []
    for temperature, members in groupby(enumerate(temperatures), lambda entry: entry[1]):
        places = [i for i, _ in members]
        spans.append((temperature, places[0], places[-1] + 1))
    return spans
