"""The processes that an engine shares its work with: what a mesh changes about a step.

Every rank calls the same methods of its engine, with the samples of its own place on the data axes
(tp, cp and pp neighbours pass the same ones; a rank may have none). Losses and gradients are sums
over all ranks divided by one weight summed over all ranks, so they do not depend on how the batch
was dealt out.

Left out: pipelines, whose passes overlap (pipeline_engine.py).
Next: sharded_adamw.py, ring_scorer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name

import torch
from torch import Tensor

from nanoengine.alone import Alone, Loss
from nanoengine.config import EngineConfig
from nanoengine.engine import ForeseeingLoss
from nanoengine.model.linear import Packed
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, add_sums, make_micro_batches
from nanoengine.parallel.expert_parallel import ExpertParallel
from nanoengine.parallel.layout import DATA_AXES
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.ring_scorer import RingScorer
from nanoengine.parallel.sharded_adamw import ShardedAdamW
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoengine.scoring import PassScorer


class Ranks(Alone):
    """The ranks of a mesh. It makes the engine's optimizer, and remembers it."""

    _optimizer: ShardedAdamW

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._grid = mesh

    @property
    def mesh(self) -> Mesh:
        return self._grid

    def check(self, model: Transformer, config: EngineConfig, *, is_pipeline: bool) -> None:
        mesh = self._grid
        if mesh.size("pp") > 1 and not is_pipeline:
            raise ValueError(f"{mesh.layout}: pp > 1 needs a PipelineEngine")
        if mesh.size("ep") > 1 and (
            not isinstance(model.experts, ExpertParallel) or model.experts.mesh is not mesh
        ):
            raise ValueError(
                f"the model's experts are not split over this mesh (ep={mesh.size('ep')}): build "
                "it with Transformer(config, experts=ExpertParallel.of(mesh, config))"
            )
        if mesh.size("cp") > 1 and config.share_prefix:
            raise ValueError("share_prefix=True: not available with cp > 1; set it to False")
        if mesh.size("tp") == 1 and model.split.size == 1:
            return
        if not isinstance(model.split, TensorParallel) or model.split.mesh is not mesh:
            raise ValueError(
                f"the model is not split over this mesh (tp={mesh.size('tp')}): build it with "
                "Transformer(config, split=TensorParallel.of(mesh, config))"
            )

    def optimizer(
        self, models: Sequence[Transformer], config: EngineConfig, dtype: torch.dtype
    ) -> ShardedAdamW:
        own = getattr(models[0], "sharded_adamw", None)  # a model that sees has its own
        kind = ShardedAdamW if own is None else resolve_name(own)
        self._optimizer = kind(
            models,
            config,
            self._grid,
            zero=config.zero,
            dtype=dtype,
            bucket_bytes=config.bucket_bytes,
        )
        return self._optimizer

    def scorer(self, model: Transformer, config: EngineConfig) -> PassScorer:
        if self._grid.size("cp") == 1:
            return super().scorer(model, config)
        return RingScorer(
            model,
            self._grid,
            micro_batch_tokens=config.micro_batch_tokens,
            activation_checkpointing=config.activation_checkpointing,
            activation_mb=config.activation_mb,
        )

    # -- passes ------------------------------------------------------------------------------

    def own_micro_batches(self, scorer: PassScorer, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Those of this rank's samples; none where it has no samples."""
        if not samples and self._grid.size(DATA_AXES) > 1:
            return []
        return scorer.micro_batches(samples)

    def micro_batches(self, scorer: PassScorer, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches, and as many without any sample as it takes for all ranks to meet in
        the same collectives."""
        micros = self.own_micro_batches(scorer, samples)
        if self._optimizer.needs_equal_passes:
            num_passes = self._grid.max_int(DATA_AXES, len(micros))
            micros += [_idle(scorer.model.device)] * (num_passes - len(micros))
        return micros

    def passes(self, micros: list[MicroBatch]) -> Iterator[MicroBatch]:
        for i, micro in enumerate(micros):
            self._optimizer.start_pass(is_last=i == len(micros) - 1)
            yield micro
            self._optimizer.end_pass()
        self._optimizer.finish_gradients()

    def joined(self, loss_fn: Loss) -> Loss:
        return _JointLoss(loss_fn) if self._optimizer.needs_equal_passes else loss_fn

    # -- sums --------------------------------------------------------------------------------

    def total(self, weight: float) -> float:
        if self._grid.size(DATA_AXES) == 1:
            return weight
        return self._grid.sum_float(DATA_AXES, weight)[0]

    def summed(self, loss: float, stats: dict[str, float]) -> tuple[float, dict[str, float]]:
        """Added in the order of the ranks, so all get the same bits."""
        if self._grid.size(DATA_AXES) == 1:
            return loss, stats
        total, sums = 0.0, dict[str, float]()
        for part_loss, part_stats in self._grid.gather_json(DATA_AXES, [loss, stats]):
            total += part_loss
            add_sums(sums, part_stats)
        return total, sums

    def refresh(self, models: Sequence[Transformer]) -> None:
        if self._optimizer.zero < 3:
            super().refresh(models)
            return
        for part in models:
            forget_packed(part)


def forget_packed(model: Transformer) -> None:
    """Drop every prepacked copy: products make them on the fly, for weights that come and go
    (ZeRO-3). Whoever keeps something of the old ones learns of it as of a `repack`."""
    model.num_repacks += 1
    for module in model.modules():
        if isinstance(module, Packed):
            module.forget()
    model.lm_head_packed = model._wide_head = None


class _JointLoss:
    """A loss whose backward pass always runs, with zeros where nothing counts: other ranks wait in
    its collectives. It is nobody's loss in a pass without samples."""

    def __init__(self, loss_fn: Loss) -> None:
        self._loss_fn = loss_fn

    def __call__(
        self, logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        if not micro.index:
            return logp_T.sum() * 0, {}
        loss_sum, sums = self._loss_fn(logp_T, entropy_T, micro)
        if not loss_sum.requires_grad:
            loss_sum = loss_sum + logp_T.sum() * 0
        return loss_sum, sums

    def foreseen_logp(self, micro: MicroBatch) -> Tensor | None:
        if not (micro.index and isinstance(self._loss_fn, ForeseeingLoss)):
            return None
        return self._loss_fn.foreseen_logp(micro)


def _idle(device: torch.device) -> MicroBatch:
    """Two tokens that belong to no sample, for a rank that has nothing to do in a pass."""
    nothing = Sample(tokens=[0, 0], loss_mask=[0, 0])
    (micro,) = make_micro_batches([nothing], 1, device=device)
    return replace(micro, index=[], starts=[0])
