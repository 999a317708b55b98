"""What other processes would change of a training step, where there are none: nothing.

An engine asks this object wherever a mesh of processes has a say: how a batch is cut, when passes
meet, what is summed. parallel/ranks.py answers for a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.model.transformer import Transformer
from nanoengine.optim import FlatAdamW
from nanoengine.packing import MicroBatch, Sample
from nanoengine.scoring import PassScorer

Loss = Callable[..., tuple[Tensor, Mapping[str, Tensor | float]]]
"""A `LossFn` of engine.py."""

_ADAMW = "nanoengine.state.kept_adamw:AdamW"
_LONE_MESH = "nanoengine.parallel.mesh:Mesh.alone"


class Alone:
    """The processes that an engine shares its work with, where there are none.

    Whatever a mesh of processes changes about a step, it changes in these methods
    (`parallel.ranks.Ranks`); the step itself is the engine's.
    """

    def __init__(self, mesh: Any = None) -> None:
        self._mesh = mesh

    @property
    def mesh(self) -> Any:
        if self._mesh is None:  # who asks is no part of a step: it knows meshes and loads them
            self._mesh = resolve_name(_LONE_MESH)()
        return self._mesh

    def check(self, model: Transformer, config: EngineConfig, *, is_pipeline: bool) -> None:
        """`ValueError` for a model that is not split as its processes are."""
        if model.split.size > 1:
            raise ValueError(
                "the model is not split over this mesh (tp=1): build it with "
                "Transformer(config, split=TensorParallel.of(mesh, config))"
            )

    def optimizer(
        self, models: Sequence[Transformer], config: EngineConfig, dtype: torch.dtype
    ) -> FlatAdamW:
        """The optimizer of the parts of the model that are here."""
        kind = getattr(models[0], "adamw", _ADAMW)  # a model that sees has its own
        made: FlatAdamW = resolve_name(kind)(models, config, dtype=dtype)
        return made

    def scorer(self, model: Transformer, config: EngineConfig) -> PassScorer:
        """The scorer, which runs the model on a micro-batch."""
        return PassScorer(
            model,
            micro_batch_tokens=config.micro_batch_tokens,
            share_prefix=config.share_prefix,
            activation_checkpointing=config.activation_checkpointing,
            activation_mb=config.activation_mb,
        )

    def micro_batches(self, scorer: PassScorer, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches of `samples`, as many as every process runs."""
        return scorer.micro_batches(samples)

    def passes(self, micros: list[MicroBatch]) -> Iterable[MicroBatch]:
        """Yield each micro-batch before its forward and backward pass."""
        return micros

    def joined(self, loss_fn: Loss) -> Loss:
        """The loss whose backward pass meets those of other processes."""
        return loss_fn

    def total(self, weight: float) -> float:
        """The weight of the whole batch, of which `weight` is this process's part."""
        return weight

    def summed(self, loss: float, stats: dict[str, float]) -> tuple[float, dict[str, float]]:
        """The loss and the sums of statistics over all processes."""
        return loss, stats

    def refresh(self, models: Sequence[Transformer]) -> None:
        """Lay the prepacked weights out anew."""
        for part in models:
            part.repack()
