"""Expert parallelism: each rank holds some experts whole; tokens travel to them and back.

    rank 0: tokens a b c ─┐ rows, sorted  ┌─ experts 0 .. X/2-1 ─┐ the same  ┌─ a b c
                          ├─ all-to-all ──┤                      ├─ rows ────┤
    rank 1: tokens d e   ─┘ by owner      └─ experts X/2 .. X-1 ─┘ back      └─ d e

Everything but the experts is data parallel over this axis. A token is sent once for each of its K
choices and its K results are summed at home, in fp32 and in the order of its choices, as on one
process: forward, the bits of a token do not depend on the number of ranks. Backward the same rows
travel the other way round. An expert's gradient is complete on its owner, whoever sent the rows,
so it is summed over dp and cp only (`ParameterRecord.is_expert`).

All ranks of the axis must run the same number of passes, also those without a sample of theirs.

Left out: capacity limits (no token is ever dropped), sending a token once to a rank that has two of
its experts, overlap of the exchange with computation, experts that are split over tp as well, and
counts that stay on the GPU: the host waits for them to know the sizes of a message.
Shapes: T tokens here, K choices a token, S = T·K slots, R rows that came here, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.moe.fused_moe import sum_of_choices
from nanoengine.model.config import ModelConfig
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.mesh import Mesh


class ExpertParallel:
    """The `experts` of a Transformer over the mesh's ep axis (an ExpertSplit)."""

    def __init__(self, mesh: Mesh, num_experts: int) -> None:
        self.mesh = mesh
        self.size, self.rank = mesh.size("ep"), mesh.rank("ep")
        self.share = num_experts // self.size
        self.held = range(self.rank * self.share, (self.rank + 1) * self.share)

    @classmethod
    def of(cls, mesh: Mesh, config: ModelConfig) -> ExpertParallel | None:
        """The split for a model of this shape; None where the mesh has one ep rank."""
        check_experts(config, mesh.layout)
        return None if mesh.size("ep") == 1 else cls(mesh, config.num_experts)

    def run(
        self,
        x_TE: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        apply: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """y [T, E] = Σ over a token's choices of weight · expert(token). `apply(rows [R, E], local
        expert of each [R])` runs the experts of this rank."""
        num_choices = ids_TK.shape[1]
        ids_S = ids_TK.flatten()
        owner_S = ids_S // self.share
        order_S = owner_S.argsort(stable=True)
        sent, came = self._count_rows(owner_S)
        local_R = ids_S.new_empty(sum(came))
        self.mesh.all_to_all("ep", local_R, ids_S[order_S] % self.share, came, sent)
        # One row a slot: the gradient of a token's copies is summed in the order of its choices.
        slots_SE = x_TE.unsqueeze(1).expand(-1, num_choices, -1).reshape(-1, x_TE.shape[1])
        rows_RE = _AllToAll.apply(slots_SE.index_select(0, order_S), self.mesh, sent, came)
        back_SE = _AllToAll.apply(apply(rows_RE, local_R), self.mesh, came, sent)
        y_SE = back_SE.index_select(0, order_S.argsort())
        return sum_of_choices(y_SE.view(*ids_TK.shape, x_TE.shape[1]), weights_TK)

    @torch.no_grad()
    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Each rank's tensor, of one shape on all."""
        out = tensor.new_empty(self.size, *tensor.shape)
        self.mesh.all_gather("ep", out, tensor)
        return list(out)

    def _count_rows(self, owner_S: Tensor) -> tuple[list[int], list[int]]:
        """Rows to each rank, rows from each rank."""
        sent = torch.bincount(owner_S, minlength=self.size)
        table = torch.stack(self.gather(sent))  # [from, to]
        return sent.tolist(), table[:, self.rank].tolist()


def check_experts(config: ModelConfig, layout: Layout) -> None:
    """`ValueError` unless the experts of a model of this shape can be split as `layout` says."""
    size = layout.ep
    if size == 1:
        return
    if config.num_experts == 0:
        raise ValueError(f"ep={size}: the model has no experts to split; use dp={size}")
    if config.num_experts % size:
        raise ValueError(
            f"ep={size}: must divide num_experts={config.num_experts}; choose another layout"
        )
    if layout.tp > 1:
        raise ValueError(
            f"ep={size} with tp={layout.tp}: experts are split over one of the two axes; set one "
            "to 1"
        )


class _AllToAll(torch.autograd.Function):
    """`sent[r]` rows to rank r, `came[r]` rows from it; the gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, sent: list[int], came: list[int]) -> Tensor:
        ctx.mesh, ctx.sent, ctx.came = mesh, sent, came
        return _exchange(x, mesh, sent, came)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(dx, ctx.mesh, ctx.came, ctx.sent), None, None, None


def _exchange(x: Tensor, mesh: Mesh, sent: list[int], came: list[int]) -> Tensor:
    out = x.new_empty(sum(came), *x.shape[1:])
    mesh.all_to_all("ep", out, x, came, sent)
    return out
