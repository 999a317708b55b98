"""A scorer whose tokens are spread over the ranks of the cp axis (context_parallel.py).

A rank reads its part of the tokens, and the log-probs are gathered so that a loss sees whole
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch
from nanoengine.parallel.context_parallel import ContextSplit
from nanoengine.parallel.mesh import Mesh
from nanoengine.scoring import Foresight, Part, PartScores, PassScorer


@dataclass(frozen=True, kw_only=True)
class RingPart(Part):
    """The rows of one rank, and the ring that it is of."""

    ring: ContextSplit


class RingScorer(PassScorer):
    """Scores as a `PassScorer` does; all ranks of the axis are given the same micro-batches."""

    def __init__(self, model: Transformer, mesh: Mesh, **options: Any) -> None:
        super().__init__(model, **options)
        self._mesh = mesh

    def part(self, micro: MicroBatch) -> RingPart:
        """This rank's rows of a micro-batch."""
        if micro.kept_T is not None:
            raise ValueError(
                "cp: the ranks of a context have no log-probs over kept tokens; train such samples "
                "with cp=1"
            )
        ring = ContextSplit(micro, self._mesh)
        top, whole = micro.top_ids_TK, super().part(micro)
        seen = None
        if whole.seen is not None:  # a rank looks at the pictures that its rows read
            seen = whole.seen.held(ring.own_rows, micro.num_rows)
        return RingPart(
            ids_N=ring.take(micro.ids_N),
            positions_N=ring.take(whole.positions_N),
            context=ring,
            rows=None,
            target_ids=ring.take(micro.target_ids_T),
            counted=ring.take(micro.loss_mask_T).nonzero().squeeze(1),
            top_ids=None if top is None else ring.take(top),
            seen=seen,
            ring=ring,
        )

    def logprobs(
        self,
        micro: MicroBatch,
        temperature: float,
        *,
        entropy: bool = False,
        only_masked: bool = False,
        foresight: Foresight | None = None,
    ) -> PartScores:
        """Score as `PassScorer` does; no rank foresees a loss of tokens it does not have."""
        return super().logprobs(micro, temperature, entropy=entropy, only_masked=only_masked)

    def whole(self, values: Tensor, part: Part) -> Tensor:
        assert isinstance(part, RingPart), "of this scorer's `part`"
        return part.ring.gather(values)
