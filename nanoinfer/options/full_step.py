"""What is not plain in a step: it is added to the step's arrays here, and its results taken.

Some requests ask for more than tokens and their log-probs (options/full_sequence.py), or tokens
were guessed (variants/speculative.py). A draft counts if it is the very token that was sampled at
its position, and the sample after the last such draft counts too.

Legend: T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoinfer.batch import RunnerOutput, StepInput
from nanoinfer.options.full_sampling import FullSamplingBatch
from nanoinfer.options.full_sequence import FullSequence
from nanoinfer.options.param_checks import logps_temperature
from nanoinfer.scheduler import BatchScheduler, Step
from nanoinfer.sequence import Sequence
from nanoinfer.variants.adapters import AdapterPool
from nanoinfer.variants.speculative import DraftedStep, accept

_PICTURES = "nanoinfer.vision.step_pictures:pictures_of"
_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class FullOutput(RunnerOutput):
    """A runner's results of a step that is not plain. `sampled` positions include drafts; `scores`
    has one entry for each prompt token to be scored.

    Of a step with a decode and a decode with one draft: `FullOutput(tokens=[7, 4, 9],
    logps=[-0.1, -2.3, -0.7], sampled_logps=[-0.1, -2.3, -0.7])`."""

    top: Mapping[int, list[tuple[int, float]]] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    score_tops: list[list[tuple[int, float]]] = field(default_factory=list)  # where asked for


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
class FullStepOptions:
    """The options of one step, as `StepInput.options` has them."""

    scored: Scored | None = None
    adapter_rows: dict[str, Tensor] = field(default_factory=dict)  # in T, of each adapter
    adapters: AdapterPool | None = None  # that those are of
    pictures: Any = None  # of its sequences (vision/step_pictures.py)

    def take(
        self, step: Step, result: RunnerOutput, scheduler: BatchScheduler, version: int
    ) -> Iterator[tuple[Sequence, int, int]]:
        """Append what was sampled to its sequences, one by one: each with how many tokens it got,
        and how many had been guessed."""
        found = result if isinstance(result, FullOutput) else FullOutput(**vars(result))
        if found.scores:
            _take_scores(step, found.scores, found.score_tops)
        scheduler.commit(step)
        row = 0
        for seq in [seq for seq in step.seqs if seq.num_uncomputed_tokens == 0]:
            drafts = drafts_of(step, seq)
            num_taken = _take_samples(seq, drafts, found, row, version)
            if drafts:
                accept(scheduler.blocks, seq, num_taken - 1)
            row += len(drafts) + 1
            yield seq, num_taken, len(drafts)
        assert row == len(found.tokens), "samples of no sequence"


def ask(inputs: StepInput, step: Step) -> StepInput:
    """The arrays of a step, completed by what its requests ask for."""
    if isinstance(step, DraftedStep) and step.drafts:
        inputs = _with_drafts(inputs, step)
    drawn: list[Sequence] = []  # the sequence of each sampled position
    for seq, length in zip(step.seqs, inputs.seq_lens, strict=True):
        num_drafts = len(drafts_of(step, seq))
        if length - num_drafts == len(seq.ids):
            drawn += [seq] * (num_drafts + 1)
    cuts = np.array([(p.top_k, p.top_p, p.min_p) for p in [seq.params for seq in drawn]])
    top_ks, top_ps, min_ps = cuts.reshape(-1, 3).T
    edits = {
        i: seq.edits
        for i, seq in enumerate(drawn)
        if isinstance(seq, FullSequence) and seq.edits is not None
    }
    sampling = FullSamplingBatch(
        *(inputs.sampling.temperatures, inputs.sampling.seeds, inputs.sampling.positions),
        *(top_ks.astype(np.int64), top_ps, min_ps),
        edits=edits,
        num_top={
            i: seq.params.top_logps
            for i, seq in enumerate(drawn)
            if seq.params.top_logps and seq.params.logps_mode != "kept"
        },
        raw_rows=[i for i, seq in enumerate(drawn) if seq.params.logps_mode == "raw"],
        kept_rows=[i for i, seq in enumerate(drawn) if seq.params.logps_mode == "kept"],
    )
    adapters = [seq.adapters for seq in step.seqs if isinstance(seq, FullSequence)]
    options = FullStepOptions(
        _scored(step),
        _adapter_rows(step),
        next((pool for pool in adapters if pool is not None), None),
        resolve_name(_PICTURES)(step) if any(seq.params.images for seq in step.seqs) else None,
    )
    return replace(inputs, sampling=sampling, options=options)


def drafts_of(step: Step, seq: Sequence) -> list[int]:
    """The tokens that were guessed after those of `seq`."""
    return step.drafts.get(seq.handle, []) if isinstance(step, DraftedStep) else []


def _with_drafts(inputs: StepInput, step: DraftedStep) -> StepInput:
    """The tokens of the step with those that were guessed, at each of which a token is drawn."""
    ids: list[int] = []
    sampled: list[int] = []
    drawn: list[tuple[float, int, int]] = []  # temperature, seed, position
    starts = inputs.query_starts
    for i, (seq, num_new) in enumerate(zip(step.seqs, step.num_scheduled_tokens, strict=True)):
        drafts = step.drafts.get(seq.handle, [])
        first, num_known = seq.num_computed_tokens, num_new - len(drafts)
        ids += [*seq.ids[first : first + num_known], *drafts]
        if first + num_known == len(seq.ids):
            for behind in range(len(drafts) + 1):
                sampled.append(starts[i + 1] - len(drafts) - 1 + behind)
                position = len(seq.ids) + behind
                drawn.append((seq.params.temperature, seq.params.seed & _U64, position))
    temperatures, seeds, positions = zip(*drawn, strict=True)
    sampling = replace(
        inputs.sampling,
        temperatures=np.array(temperatures, dtype=np.float64),
        seeds=np.array(seeds, dtype=np.uint64),
        positions=np.array(positions, dtype=np.int64),
    )
    return replace(
        inputs,
        ids_T=torch.tensor(ids, dtype=torch.int64),
        sampled=None if len(sampled) == len(ids) else torch.tensor(sampled),
        sampling=sampling,
    )


def _adapter_rows(step: Step) -> dict[str, Tensor]:
    """The rows of each adapter in the step."""
    names = [seq.params.adapter for seq in step.seqs]
    if not any(names):
        return {}
    of_row = np.repeat(np.array(names), step.num_scheduled_tokens)
    return {
        name: torch.from_numpy(np.flatnonzero(of_row == name))
        for name in dict.fromkeys(names)
        if name
    }


def _scored(step: Step) -> Scored | None:
    found: list[tuple[float, int, int, int, int]] = []  # temperature, place, row, id, likeliest
    start = 0
    for seq, num_new in zip(step.seqs, step.num_scheduled_tokens, strict=True):
        for position in unscored(seq, num_new):
            row = start + position - seq.num_computed_tokens
            next_id, params = seq.ids[position + 1], seq.params
            found.append((logps_temperature(params), len(found), row, next_id, params.top_logps))
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


def unscored(seq: Sequence, num_new: int) -> range:
    """Positions among the next `num_new` tokens whose successor in the prompt is to be scored."""
    return seq.unscored(num_new) if isinstance(seq, FullSequence) else range(0)


def _take_scores(step: Step, scores: list[float], tops: list[list[tuple[int, float]]]) -> None:
    """Give the log-probs of prompt tokens to their sequences. Call before the scheduler's `commit`,
    which moves on where a sequence stands."""
    done = 0
    for seq, num_new in zip(step.seqs, step.num_scheduled_tokens, strict=True):
        if isinstance(seq, FullSequence):
            count = len(seq.unscored(num_new))
            seq.prompt_logps += scores[done : done + count]
            if seq.params.top_logps:
                seq.prompt_top_logps += tops[done : done + count]
            done += count


def _take_samples(
    seq: Sequence, drafts: list[int], result: FullOutput, row: int, version: int
) -> int:
    """Append the samples of `seq` that count; its rows of `result` start at `row`. Returns how many
    there were: one, and one for each accepted draft."""
    end = row
    for draft in (*drafts, None):
        token = result.tokens[end]
        if end in result.top and isinstance(seq, FullSequence):
            seq.top_logps.append(result.top[end])
        seq.append(token, result.logps[end], version, result.sampled_logps[end])
        end += 1
        if seq.finish_reason is not None or token != draft:
            break
    return end - row
