"""The mixture-of-experts MLP: a router, and stacks of expert matrices.

Shapes: T tokens, E hidden size, F expert width, X experts, K experts a token.

The router is one more packed linear; its probabilities are taken in fp32. Expert matrices lie in
two stacks, gate and up side by side as in the dense MLP, each expert prepacked on a CPU
(`kernels/linear.py` says why). Rollout and trainer run these lines with the same bits.
Left out: the load-balancing loss (a policy is trained on its reward alone), shared experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels import fused_moe, topk_softmax
from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import PackedLinear, refresh_packed


class ExpertStack(nn.Module):
    """One matrix an expert, [X, out, in], with their prepacked copies beside it."""

    def __init__(
        self, num_experts: int, num_in: int, num_out: int, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        shape = (num_experts, num_out, num_in)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        self.packed: list[Tensor | None] = [None] * num_experts

    def repack(self) -> None:
        pairs = zip(self.packed, self.weight, strict=True)
        self.packed = [refresh_packed(old, weight) for old, weight in pairs]


class MoeMlp(nn.Module):
    """y = Σ of the K most probable experts' MLPs, weighted with their probabilities."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.num_chosen = config.num_experts_per_token
        self.renormalize = config.norm_topk_prob
        self.router = PackedLinear(hidden, config.num_experts, False, dtype, device)
        self.gate_up = ExpertStack(config.num_experts, hidden, 2 * width, dtype, device)
        self.down = ExpertStack(config.num_experts, width, hidden, dtype, device)

    def forward(self, x_TE: Tensor) -> Tensor:
        weights_TK, ids_TK = topk_softmax(
            self.router(x_TE), self.num_chosen, renormalize=self.renormalize
        )
        return fused_moe(
            x_TE,
            self.gate_up.weight,
            self.down.weight,
            weights_TK,
            ids_TK,
            packed=(self.gate_up.packed, self.down.packed),
        )
