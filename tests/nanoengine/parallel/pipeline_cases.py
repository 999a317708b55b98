"""What the ranks do in test_pipeline.py."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from pool import Rank
from torch import Tensor

from kernels import linear_logprob
from nanoengine.model.attention import PackedContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, make_micro_batches
from nanoengine.parallel import pipeline
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.pipeline import PipelineRunner, StageChunk
from nanoengine.parallel.schedules import forward_only, make_schedule
from nanoengine.parallel.stage import Stage, make_stages, sum_tied_gradients

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)


def draw_micros(num_micro: int) -> list[MicroBatch]:
    """Micro-batches of unequal length and mask; the second one has no counted token."""
    generator = torch.Generator().manual_seed(7)
    micros = []
    for i in range(num_micro):
        samples = []
        for n in (5 + i % 3, 9 - i % 4):
            tokens = torch.randint(0, 61, (n,), generator=generator).tolist()
            mask = [0] + [0 if i == 1 else int(t % (i + 2) != 0) for t in range(1, n)]
            samples.append(Sample(tokens=tokens, loss_mask=mask))
        micros += make_micro_batches(samples, 100)
    return micros


def loss_of(model: Transformer, micro: MicroBatch, hidden_NE: Tensor, weight: float) -> Tensor:
    logp_T = linear_logprob(hidden_NE, model.lm_head_weight, micro.target_ids_T)
    assert isinstance(logp_T, Tensor)
    return -(logp_T * micro.loss_mask_T).sum() / weight


def context_of(micro: MicroBatch) -> PackedContext:
    return PackedContext(micro.cu_seqlens, micro.max_seqlen)


def reference(tied: bool, dtype: torch.dtype, num_micro: int) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss of the whole model in this process."""
    model = Transformer(replace(CONFIG, tie_word_embeddings=tied), dtype)
    model.init_weights(3, std=0.4)
    micros = draw_micros(num_micro)
    weight = float(sum(micro.loss_mask_T.sum() for micro in micros))
    total = 0.0
    for micro in micros:
        hidden = model(micro.ids_N, micro.positions_N, context_of(micro))
        loss = loss_of(model, micro, hidden, weight)
        loss.backward()
        total += float(loss.detach())
    return {name: p.grad.clone() for name, p in model.named_parameters()}, total


@dataclass(frozen=True)
class Case:
    schedule: str
    chunks: int = 1
    num_micro: int = 4
    tied: bool = True
    dtype: torch.dtype = torch.float64
    checkpointing: bool = False
    sums_tied: bool = True


@dataclass
class Found:
    grads: dict[str, Tensor]
    loss: float
    peak_live: int
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
    logps: list[Tensor] = field(default_factory=list)


def most_sent_at_once(rank: Rank, case: Case) -> int:
    """Tensors that this rank has sent and still holds for a neighbour, at most."""
    most = 0
    give = pipeline._Mailbox.give

    def count(mailbox: Any, *args: Any) -> None:
        nonlocal most
        give(mailbox, *args)
        most = max(most, sum(map(len, mailbox._sent.values())))

    with mock.patch.object(pipeline._Mailbox, "give", count):
        gradients(rank, case)
    return most


def gradients(rank: Rank, case: Case) -> Found:
    mesh = rank.mesh(Layout(pp=rank.world))
    config = replace(CONFIG, tie_word_embeddings=case.tied)
    stages = make_stages(mesh, config, case.chunks, case.dtype)
    for stage in stages:
        stage.init_weights(3, std=0.4)
    micros = draw_micros(case.num_micro)
    weight = float(sum(micro.loss_mask_T.sum() for micro in micros))
    losses: list[Tensor] = []

    def compute(stage: Stage, index: int, x: Tensor | None) -> Tensor:
        micro = micros[index]
        y = stage(
            micro.ids_N,
            micro.positions_N,
            context_of(micro),
            x_TE=x,
            activation_checkpointing=case.checkpointing,
        )
        if not stage.is_last:
            return y
        losses.append(loss_of(stage, micro, y, weight))
        return losses[-1]

    def boundary(stage: Stage, index: int, is_output: bool) -> Tensor:
        return stage.boundary(micros[index].num_rows)

    chunks = [StageChunk(stage, compute, boundary) for stage in stages]
    runner = PipelineRunner(mesh, chunks)
    runner.run(make_schedule(case.schedule, rank.world, case.num_micro, case.chunks))
    traffic = {op: (t.calls, t.bytes) for (op, _), t in mesh.traffic.items()}
    if case.sums_tied:
        sum_tied_gradients(mesh, config, stages)
    grads = {
        name: parameter.grad
        for stage in stages
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    }
    assert all(chunk.num_live == 0 for chunk in chunks)
    loss = sum(float(loss.detach()) for loss in losses)
    return Found(grads, loss, runner.peak_live, traffic)


def forward(rank: Rank, chunks: int, num_micro: int) -> list[Tensor]:
    """Hidden states of every micro-batch, on the last stage; nothing stays alive."""
    mesh = rank.mesh(Layout(pp=rank.world))
    stages = make_stages(mesh, CONFIG, chunks)
    for stage in stages:
        stage.init_weights(3, std=0.4)
    micros, found = draw_micros(num_micro), []

    def compute(stage: Stage, index: int, x: Tensor | None) -> Tensor:
        micro = micros[index]
        y = stage(micro.ids_N, micro.positions_N, context_of(micro), x_TE=x)
        if stage.is_last:
            found.append(y)
        return y

    def boundary(stage: Stage, index: int, is_output: bool) -> Tensor:
        return stage.boundary(micros[index].num_rows)

    runner = PipelineRunner(mesh, [StageChunk(s, compute, boundary, keeps=False) for s in stages])
    with torch.no_grad():
        runner.run(forward_only(rank.world, num_micro, chunks))
    assert runner.peak_live == 0
    return found


class SleepChunk:
    """Computes by sleeping; remembers how long it really slept."""

    def __init__(self, unit_s: float, is_last: bool) -> None:
        self.unit_s, self.is_last = unit_s, is_last
        self.busy_s, self.last_end = 0.0, 0.0
        self.live: set[int] = set()
        self.late: set[int] = set()

    @property
    def num_live(self) -> int:
        return len(self.live) + len(self.late)

    def boundary(self, micro: int, *, is_output: bool = False) -> Tensor:
        return torch.empty(8, 4 + micro)

    def forward(self, micro: int, x: Tensor | None) -> Tensor | None:
        self.live.add(micro)
        self._work(1)
        return None if self.is_last else self.boundary(micro)

    def backward(self, micro: int, dy: Tensor | None) -> Tensor | None:
        self.live.remove(micro)
        self._work(2)
        return self.boundary(micro)

    def backward_input(self, micro: int, dy: Tensor | None) -> Tensor | None:
        self.live.remove(micro)
        self.late.add(micro)
        self._work(1)
        return self.boundary(micro)

    def backward_weight(self, micro: int) -> None:
        self.late.remove(micro)
        self._work(1)

    def _work(self, units: int) -> None:
        begin = time.monotonic()
        time.sleep(units * self.unit_s)
        self.last_end = time.monotonic()
        self.busy_s += self.last_end - begin


def bubble(rank: Rank, name: str, num_micro: int, chunks: int, unit_s: float) -> dict[str, Any]:
    """Idle share of the wall-clock, all ranks starting together; CLOCK_MONOTONIC is shared."""
    mesh = rank.mesh(Layout(pp=rank.world))
    schedule = make_schedule(name, rank.world, num_micro, chunks)
    mine = [
        SleepChunk(unit_s / chunks, chunk == chunks - 1 and rank.rank == rank.world - 1)
        for chunk in range(chunks)
    ]
    runner = PipelineRunner(mesh, mine)
    mesh.barrier()
    begin = time.monotonic()
    runner.run(schedule)
    return {
        "begin": begin,
        "end": max(chunk.last_end for chunk in mine),
        "busy_s": sum(chunk.busy_s for chunk in mine),
        "peak_live": runner.peak_live,
    }
