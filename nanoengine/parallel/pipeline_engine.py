"""The engine over a pipeline: the same steps, with the micro-batches run by a schedule.

Every pipeline rank is given the same samples and cuts them into the same micro-batches. The last
rank has the log-probs and so the loss; its sums are told to the others, so that `train_step`
returns the same on every rank. All micro-batches of a step count as one backward pass for the
gradient reduction: they overlap, so a bucket can leave only at their end. With ZeRO-2 the whole
gradients of the stage therefore exist during the step and are cut after it.

Left out: overlapping the data-parallel reduction with the pipeline's last backward passes, ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.engine import LossFn
from nanoengine.formats import hf
from nanoengine.heads.top_tokens import pick_top
from nanoengine.model.transformer import Transformer
from nanoengine.packing import (
    MicroBatch,
    Sample,
    TopTokens,
    add_sums,
    collect,
    zeros_like_tokens,
)
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.pipeline import PipelineRunner, StageChunk
from nanoengine.parallel.ranks import Ranks
from nanoengine.parallel.schedules import SCHEDULES, forward_only, make_schedule
from nanoengine.parallel.sharded_adamw import ShardedAdamW
from nanoengine.parallel.stage import Stage, sum_tied_gradients
from nanoengine.parallel.tensor_parallel import gather_slice
from nanoengine.scoring import Part
from nanoengine.state.whole_engine import Engine

HOLDERS = ("pp", "ep")
"""Ranks that together hold every tensor (tensor-parallel neighbours each a slice)."""


class PipelineEngine(Engine):
    """Trains the `stages` this rank holds (`make_stages`), which it converts to `config.dtype`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        config: EngineConfig,
        mesh: Mesh,
        *,
        schedule: str = "1f1b",
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: must be one of {', '.join(SCHEDULES)}")
        if mesh.size("pp") == 1:
            raise ValueError("pp=1: there is no pipeline; use Engine")
        make_schedule(schedule, mesh.size("pp"), 1, len(stages))  # chunks where there are none
        self.stages = list(stages)
        self.schedule = schedule
        self.peak_live = 0  # activations of a chunk alive at once in the last step
        super().__init__(stages[-1], config, mesh, stages=self.stages)

    @property
    def mesh(self) -> Mesh:
        assert isinstance(self.ranks, Ranks), "the constructor refuses a pipeline of one rank"
        return self.ranks.mesh

    def _passes(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Only ranks that share experts meet inside a pass."""
        if self.mesh.size("ep") > 1:
            return super()._passes(samples)
        assert isinstance(self.ranks, Ranks), "as above"
        return self.ranks.own_micro_batches(self._scorer, samples)

    # -- log-probs ---------------------------------------------------------------------------

    def _score(
        self, samples: Sequence[Sample], temperature: float, entropy: bool, only_masked: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Score as `Engine._score` does; every rank gets the result."""
        found = zeros_like_tokens(samples)
        entropies = zeros_like_tokens(samples)
        micros = self._passes(samples)

        def score(stage: Stage, part: Part, index: int, hidden_ND: Tensor) -> Tensor:
            logp_T, entropy_T, _ = self._scorer.score(
                part, hidden_ND, temperature, entropy=entropy, only_masked=only_masked
            )
            collect(found, micros[index], logp_T)
            if entropy_T is not None:
                collect(entropies, micros[index], entropy_T)
            return logp_T

        chunks = len(self.stages)
        with self._kernels():
            runner = self._runner(micros, score, keeps=False)
            if micros:
                runner.run(forward_only(self.mesh.size("pp"), len(micros), chunks))
        return self._tell(found), self._tell(entropies) if entropy else []

    @torch.no_grad()
    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """Find as `Engine.forward_top` does; every rank gets the result."""
        micros = self._passes(samples)
        ids, logps = ([torch.zeros(len(s.tokens), k) for s in samples] for _ in range(2))

        def pick(stage: Stage, part: Part, index: int, hidden_ND: Tensor) -> Tensor:
            ids_TK, logp_TK = pick_top(self._scorer, part, hidden_ND, k, temperature)
            collect(ids, micros[index], ids_TK.to(torch.float64))  # as numbers, to be told
            collect(logps, micros[index], logp_TK)
            return logp_TK

        with self._kernels():
            runner = self._runner(micros, pick, keeps=False)
            if micros:
                size, chunks = self.mesh.size("pp"), len(self.stages)
                runner.run(forward_only(size, len(micros), chunks))
        return [
            TopTokens(ids_NK.to(torch.int64), logp_NK.float())
            for ids_NK, logp_NK in zip(self._tell(ids), self._tell(logps), strict=True)
        ]

    def _runner(self, micros: list[MicroBatch], score: Any, *, keeps: bool) -> PipelineRunner:
        """`score(stage, part, index, hidden)` is called on the last stage."""
        parts = [self._scorer.part(micro) for micro in micros]

        def compute(stage: Stage, index: int, x: Tensor | None) -> Tensor:
            part = parts[index]
            y = stage(
                part.ids_N,
                part.positions_N,
                part.context,
                x_TE=x,
                activation_checkpointing=self.config.activation_checkpointing,
                **({} if part.seen is None else {"rows": part.seen}),
            )
            return score(stage, part, index, y) if stage.is_last else y

        def boundary(stage: Any, index: int, is_output: bool) -> Tensor:
            seen, num_rows = parts[index].seen, len(parts[index].ids_N)
            if seen is None:
                found: Tensor = stage.boundary(num_rows)
            else:
                found = stage.boundary_of(seen, num_rows, is_output=is_output)
            return found

        chunks = [StageChunk(stage, compute, boundary, keeps=keeps) for stage in self.stages]
        return PipelineRunner(self.mesh, chunks)

    # -- one optimizer step ------------------------------------------------------------------

    def _accumulate_gradients(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight: float,
        temperature: float,
        entropy: bool,
    ) -> tuple[float, dict[str, float]]:
        optimizer = self.optimizer
        assert isinstance(optimizer, ShardedAdamW), "a mesh's"
        micros = self._passes(samples)
        logps = zeros_like_tokens(samples)
        losses: list[float] = []
        stats: dict[str, float] = {}

        def score(stage: Stage, part: Part, index: int, hidden_ND: Tensor) -> Tensor:
            micro = micros[index]
            scored = self._scorer.score(
                part, hidden_ND, temperature, entropy=entropy, only_masked=True
            )
            logp_T, entropy_T, _ = scored
            if not micro.index:
                return logp_T.sum() * 0
            loss_sum, sums = loss_fn(logp_T, entropy_T, scored.told(micro))
            loss = loss_sum / weight
            losses.append(float(loss.detach()))
            collect(logps, micro, logp_T.detach())
            add_sums(stats, sums)
            return loss if loss.requires_grad else loss + logp_T.sum() * 0

        optimizer.start_pass(is_last=False, is_pipeline=True)
        with self._kernels():
            if micros:
                runner = self._runner(micros, score, keeps=True)
                size = self.mesh.size("pp")
                runner.run(make_schedule(self.schedule, size, len(micros), len(self.stages)))
                self.peak_live = runner.peak_live
        sum_tied_gradients(self.mesh, self.model.config, self.stages)
        optimizer.end_pass()
        optimizer.finish_gradients()
        self.last_logps = self._tell(logps)
        total, sums = self.mesh.gather_json("pp", [sum(losses), stats])[-1]
        return total, sums

    def _tell(self, values: list[Tensor]) -> list[Tensor]:
        """The last stage's per-token values, on every pipeline rank."""
        if not values:
            return values
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        flat = torch.cat(values).to(self.mesh.device, dtype)  # ids fit: below 2^24
        self.mesh.broadcast("pp", flat, self.mesh.size("pp") - 1)
        return list(flat.cpu().split([len(value) for value in values]))

    # -- weights -----------------------------------------------------------------------------

    def export_state(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each Hugging Face tensor once, whole, on every rank; all must run through the iterator.
        `reshard.py` moves slices instead, and is what weight synchronisation should use."""
        mine: dict[str, tuple[Transformer, Tensor]] = {}
        for stage in self.stages:
            for name, view in hf.hf_views(stage).items():
                mine.setdefault(name, (stage, view))
        owners: dict[str, int] = {}
        for rank, names in enumerate(self.mesh.gather_json(HOLDERS, list(mine))):
            for name in names:
                owners.setdefault(name, rank)
        config = self.model.config
        whole = hf.hf_views(hf.model_class(config)(config, device="meta"))
        kind = self.model.dtype if dtype is None else dtype
        for name, shape in ((name, view.shape) for name, view in whole.items()):
            tensor = torch.empty(shape, dtype=kind, device=self.mesh.device)
            if name in mine:
                self._put_together(name, *mine[name], into=tensor)
            self.mesh.broadcast(HOLDERS, tensor, owners[name])
            yield name, tensor

    def _put_together(self, name: str, holder: Transformer, view: Tensor, *, into: Tensor) -> None:
        """The whole tensor of which `view` is this rank's part; all ranks that have one call it."""
        part = hf.hf_slices(holder).get(name)
        if holder.experts is not None and hf.is_expert_stack(name):
            view = torch.cat(holder.experts.gather(view))
        elif part is not None:
            view = gather_slice(self.mesh, view, part)
        into.copy_(view)

    def load_weights(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights as `Engine.load_weights` does. Every rank is given all tensors."""
        hf.load_stages(self.stages, state)
        self.optimizer.read_weights()
        self._refresh()
