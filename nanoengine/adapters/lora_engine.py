"""The training engine of one adapter: `Engine`, whose optimizer owns A and B and nothing else.

Log-probs, micro-batches, losses, checkpoints and resuming are the engine's own. What differs is
what is trained (an AdamW over the adapter's few numbers) and what "refresh" means (merge them into
the model again). Several engines may share one base, one for each adapter: each makes its adapter
the active one before it computes, and is called while no other is.

A checkpoint holds A, B and their moments; the base is the model folder's.
Left out: meshes of several ranks.
Next: lora_adapter.py, which says why the weights are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from nanoengine.adapters.lora_adapter import LoraAdapter
from nanoengine.config import EngineConfig
from nanoengine.engine import LossFn
from nanoengine.model.transformer import Transformer
from nanoengine.optim import DTYPES
from nanoengine.packing import Sample
from nanoengine.state.kept_adamw import AdamW
from nanoengine.state.whole_engine import Engine


class LoraEngine(Engine):
    """Trains `adapter`; `model` is its base's, and holds the effective weights after each step."""

    def __init__(self, adapter: LoraAdapter, config: EngineConfig) -> None:
        """`ValueError` unless the base is in `config.dtype`: others may train on it, too."""
        found, wanted = adapter.base.model.dtype, DTYPES[config.dtype]
        if found != wanted:
            raise ValueError(
                f"dtype={config.dtype!r}: the adapter's base is in {found}; make it with "
                f"LoraBase(model, {wanted})"
            )
        self.adapter = adapter
        super().__init__(adapter.base.model, config)
        self.model.repack()  # the head may be another dtype's now

    def _check_model(self, model: Transformer) -> None:
        """`LoraBase` has."""

    def _make_optimizer(self, dtype: torch.dtype) -> AdamW:
        wide = torch.promote_types(dtype, torch.float32)
        return AdamW([self.adapter], self.config, dtype=wide)

    @contextmanager
    def _packed_lent(self) -> Iterator[None]:
        """The copies are the base's, which other adapters read too."""
        yield

    def _refresh(self) -> None:
        self.adapter.is_stale = True
        self.adapter.activate()

    def _score(
        self, samples: Sequence[Sample], temperature: float, entropy: bool, only_masked: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        self.adapter.activate()
        return super()._score(samples, temperature, entropy, only_masked)

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight: float = 1.0,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[float, dict[str, float]]:
        """As `Engine.forward_backward`: gradients of A and B."""
        self.adapter.activate()
        return super().forward_backward(
            samples, loss_fn, weight, temperature=temperature, entropy=entropy
        )

    def export_state(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each Hugging Face tensor once, merged: what the rollout engine is given."""
        self.adapter.activate()
        yield from super().export_state(dtype)

    def load_weights(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """`ValueError`: the weights are frozen, and those of other adapters as well."""
        raise ValueError(
            "load_weights: the base of an adapter is frozen; load the model before LoraBase, or "
            "call adapter.load"
        )
