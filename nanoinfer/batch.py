"""A step as arrays. Rows are updated as sequences grow, so a step costs no pass over tokens.

A running sequence owns one row of every array from admission to its end: block table, temperature,
seed. `build` gathers the rows of a step into what the model runner feeds.

Legend: T tokens of the step, S sequences of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nanoinfer.sampler import SamplingBatch
from nanoinfer.scheduler import BatchScheduler, Step
from nanoinfer.sequence import Sequence

_ASKED = "nanoinfer.options.full_step:ask"  # completes a step in which not all is plain


@dataclass(frozen=True)
class StepInput:
    """One forward pass. `sampled` are the positions in T whose logits are wanted, None for all: the
    last of a sequence whose tokens are all computed then. `sampling` has one entry for each of
    them.

    Two decodes at positions 10 and 7, in blocks of 4: `ids_T=[5, 9]`, `positions_T=[10, 7]`,
    `slots_T=[14, 23]`, `query_starts=[0, 1, 2]`, `seq_lens=[11, 8]`,
    `block_tables=[[0, 1, 3], [4, 5, 0]]` (padded), `sampled=None`."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    query_starts: list[int]  # [S + 1]
    seq_lens: list[int]  # [S], keys, new tokens included
    block_tables: Tensor  # [S, blocks]
    copies: Tensor | None  # [copies, 2], from block to block
    sampled: Tensor | None
    sampling: SamplingBatch
    options: StepOptions | None = None


@dataclass(frozen=True)
class RunnerOutput:
    """One entry for each sampled position, in the order of the step.

    Of a step with two decodes: `RunnerOutput(tokens=[7, 4], logps=[-0.1, -2.3],
    sampled_logps=[-0.1, -2.3])`."""

    tokens: list[int]
    logps: list[float]
    sampled_logps: list[float]


class StepOptions(Protocol):
    """The part of a step that is not plain (nanoinfer/options/full_step.py): some request asks for
    more than tokens and their log-probs, or tokens were guessed."""

    def take(
        self, step: Step, result: RunnerOutput, scheduler: BatchScheduler, version: int
    ) -> Iterator[tuple[Sequence, int, int]]:
        """Append what was sampled to its sequences, one by one: each with how many tokens it got,
        and how many had been guessed."""


class Batch:
    """The rows of all running sequences."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._temperatures = np.zeros(max_num_seqs)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)

    def build(self, step: Step) -> StepInput:
        """The arrays of a scheduled step."""
        for seq in step.seqs:
            self._refresh(seq)
        rows = np.array([seq.row for seq in step.seqs])
        counts = np.array(step.num_scheduled_tokens)
        first = np.array([seq.num_computed_tokens for seq in step.seqs])
        ends = counts.cumsum()
        # Tokens of all sequences lie one after the other, without padding: a step may hold decodes
        # and chunks of prompts, and each token needs to know whose it is and where it stands.
        of_seq = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + first[of_seq]
        blocks = self._tables[rows[of_seq], positions // self.block_size]
        lens = first + counts
        # A chunk that ends before its prompt does predicts a token that is known: nothing is drawn.
        is_last = lens == np.array([len(seq.ids) for seq in step.seqs])
        sampled = ends[is_last] - 1
        width = -(-int(lens.max()) // self.block_size)
        inputs = StepInput(
            ids_T=torch.tensor(_new_ids(step), dtype=torch.int64),
            positions_T=torch.from_numpy(positions),
            slots_T=torch.from_numpy(blocks * self.block_size + positions % self.block_size),
            query_starts=[0, *ends.tolist()],
            seq_lens=lens.tolist(),
            block_tables=torch.from_numpy(self._tables[rows, :width]),
            copies=torch.tensor(step.copies) if step.copies else None,
            sampled=None if len(sampled) == ends[-1] else torch.from_numpy(sampled),
            sampling=SamplingBatch(
                temperatures=self._temperatures[rows[is_last]],
                seeds=self._seeds[rows[is_last]],
                positions=lens[is_last],
            ),
        )
        return inputs if step.is_plain else _asked()(inputs, step)

    def _refresh(self, seq: Sequence) -> None:
        """Bring the row of `seq` up to date: usually nothing, sometimes one more block."""
        row, num_blocks = seq.row, len(seq.block_table)
        if seq.num_blocks_in_row == 0:  # newly admitted
            self._temperatures[row] = seq.params.temperature
            self._seeds[row] = seq.params.seed & 0xFFFFFFFFFFFFFFFF
        if seq.num_blocks_in_row != num_blocks:
            self._tables[row, seq.num_blocks_in_row : num_blocks] = seq.block_table[
                seq.num_blocks_in_row :
            ]
            seq.num_blocks_in_row = num_blocks


def _new_ids(step: Step) -> Rows[int]:
    ids: list[int] = []
    for seq, num_new in zip(step.seqs, step.num_scheduled_tokens, strict=True):
        if num_new == 1:
            ids.append(seq.ids[seq.num_computed_tokens])
        else:
            ids += seq.ids[seq.num_computed_tokens : seq.num_computed_tokens + num_new]
    return ids


@cache
def _asked() -> Any:
    return resolve_name(_ASKED)
