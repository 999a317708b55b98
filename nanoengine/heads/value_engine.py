"""A critic: the policy's body with one number in place of the output head, trained by an Engine.

The value at token t is read where token t is predicted: from the hidden state of the token before,
which is the state that the policy acted in. So values have the shape and the places of log-probs,
and packing, shared prompts, micro-batches, checkpoints and resuming are the engine's.

Left out: critics whose layers, matrices or experts are split (pp, tp, ep): every rank of a mesh
holds the whole critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine.config import EngineConfig
from nanoengine.model.linear import LogprobOptions
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample
from nanoengine.state.whole_engine import Engine

_SEEING = "nanoengine.vision.seeing_value:SeeingValueModel"


class ValueModel(Transformer):
    """A Transformer's body with a value head, which starts as zeros: every value is 0 at first."""

    def __init__(self, policy: Transformer, dtype: torch.dtype = torch.float32) -> None:
        """Copies the weights of `policy`."""
        super().__init__(policy.config, dtype, str(policy.device))
        self.head = None
        zeros = torch.zeros(1, policy.config.hidden_size, dtype=dtype, device=policy.device)
        self.value_head = nn.Parameter(zeros)
        theirs = dict(policy.named_parameters())
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name != "value_head":
                    parameter.copy_(theirs[name])
        self.repack()

    def _repack_head(self) -> None:
        """There are no logits."""

    def logprobs(
        self, hidden_PE: Tensor, ids_P: Tensor, options: LogprobOptions | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Values in the place of log-probs: of the state that each id was chosen in."""
        wide = torch.promote_types(hidden_PE.dtype, torch.float32)
        return (hidden_PE.to(wide) @ self.value_head.to(wide).t()).squeeze(1), None


def value_model(policy: Transformer) -> ValueModel:
    """A critic's model with the weights of `policy`, which sees what that sees."""
    kind = resolve_name(_SEEING) if hasattr(policy, "visual") else ValueModel
    made: ValueModel = kind(policy)
    return made


class ValueEngine(Engine):
    """Trains a ValueModel: a loss function is handed value_T in the place of logp_T, and
    `last_logps` holds the values of the last step."""

    def __init__(self, model: ValueModel, config: EngineConfig, mesh: Any = None) -> None:
        """Without a mesh (a `parallel.mesh.Mesh`) this process trains alone; `ValueError` for one
        that splits the model."""
        if mesh is not None and mesh.size(("pp", "ep", "tp")) > 1:
            raise ValueError(
                f"{mesh.layout}: a critic is whole on every rank; use dp, cp and zero instead of "
                "pp, tp and ep"
            )
        super().__init__(model, config, mesh)

    def forward_values(self, samples: Sequence[Sample]) -> list[Tensor]:
        """For each sample its values, one for each token; 0 where the loss mask is 0."""
        return self.forward_logprobs(samples, only_masked=True)

    def _passes(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        # A value is of a state. What truncation kept of the vocabulary has no say in it, and would
        # have log-probs computed in its place.
        return super()._passes([replace(sample, kept=None) for sample in samples])
