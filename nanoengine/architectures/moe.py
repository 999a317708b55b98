"""The mixture-of-experts MLP: a router, and stacks of expert matrices.

Shapes: T tokens, E hidden size, F expert width, X experts, K experts a token.

The router is one more packed linear; its probabilities are taken in fp32. Expert matrices lie in
two stacks, gate and up side by side as in the dense MLP, each expert prepacked on a CPU
(`kernels/linear.py` says why). Rollout and trainer run these lines with the same bits.

Over tensor-parallel ranks (`split`) each expert is cut by its width, as the dense MLP is; over
expert-parallel ranks (`experts`, parallel/expert_parallel.py) each rank holds some experts whole.
Left out: the load-balancing loss (a policy is trained on its reward alone), shared experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from kernels import fused_moe, pack_weight, topk_softmax
from nanoengine.formats.families import family_of
from nanoengine.model.config import ModelConfig
from nanoengine.model.linear import Packed, PackedLinear, TensorSplit
from nanoengine.parallel.parameter_record import Slice, mark_partial, mark_slice, record_of


class ExpertSplit(Protocol):
    """The questions that the MLP asks of the ranks that share its experts."""

    held: range
    """The experts of this rank."""

    def run(
        self,
        x_TE: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        apply: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor: ...

    def gather(self, tensor: Tensor) -> list[Tensor]: ...


class ExpertStack(Packed):
    """One matrix an expert, [X, out, in], with their prepacked copies beside it, and where the
    family has them biases [X, out]."""

    def __init__(
        self,
        num_experts: int,
        num_in: int,
        num_out: int,
        has_bias: bool,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        super().__init__()
        shape = (num_experts, num_out, num_in)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        bias = torch.zeros(shape[:2], dtype=dtype, device=device) if has_bias else None
        self.bias = nn.Parameter(bias) if bias is not None else None
        self.packed: list[Tensor | None] = [None] * num_experts

    def repack(self) -> None:
        pairs = zip(self.packed, self.weight, strict=True)
        self.packed = [pack_weight(weight, old) for old, weight in pairs]

    def forget(self) -> None:
        self.packed = [None] * len(self.packed)


class MoeMlp(nn.Module):
    """y = Σ of the K most probable experts' MLPs, weighted with their probabilities."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: str,
        split: TensorSplit,
        experts: ExpertSplit | None = None,
    ) -> None:
        super().__init__()
        self.split, self.experts = split, experts
        self.num_chosen = config.num_experts_per_token
        self.renormalize = config.norm_topk_prob
        self.held = range(config.num_experts) if experts is None else experts.held
        hidden, width = config.hidden_size, config.moe_intermediate_size // split.size
        # one switch: stacked experts have biases and the clamped activation (families.py)
        self.is_stacked = family_of(config.model_type).experts == "stacked"
        shape = (self.is_stacked, dtype, device)
        self.router = PackedLinear(hidden, config.num_experts, *shape)
        self.gate_up = ExpertStack(len(self.held), hidden, 2 * width, *shape)
        self.down = ExpertStack(len(self.held), width, hidden, *shape)
        # gate and up lie side by side, or alternate
        widths = (2 * width,) if self.is_stacked else (width, width)
        for parameter in (self.gate_up.weight, self.gate_up.bias):
            mark_slice(parameter, 1, widths, split)
        mark_slice(self.down.weight, 2, (width,), split)
        if split.size > 1:
            mark_partial(self.down.bias)
        if split.sequence_parallel:
            mark_partial(self.router.weight)
            mark_partial(self.router.bias)
        if experts is not None:
            run = (self.held.start, self.held.stop)
            for stack in (self.gate_up, self.down):
                for parameter in stack.parameters():
                    record = record_of(parameter)
                    record.slice, record.is_expert = Slice(0, config.num_experts, (run,)), True

    def forward(self, x_TE: Tensor, num_rows: int) -> Tensor:
        """`num_rows` is the number of tokens, where `x` is a rank's share of them."""
        weights_TK, ids_TK = topk_softmax(
            self.router(x_TE), self.num_chosen, renormalize=self.renormalize
        )
        if self.experts is not None:
            return self.experts.run(x_TE, weights_TK, ids_TK, self._mix_one)
        # Routed before entering: the weights' gradient is a sum over the ranks as well.
        entered = (self.split.enter(t, num_rows) for t in (x_TE, weights_TK, ids_TK))
        return self.split.leave(self._mix(*entered))

    def _biases(self) -> tuple[Tensor, Tensor] | None:
        """Those of gate and up, and of down, which are added once and not on every rank."""
        if self.gate_up.bias is None or self.down.bias is None:
            return None
        of_down: Tensor = self.down.bias
        return self.gate_up.bias, of_down if self.split.rank == 0 else of_down * 0.0

    def _mix_one(self, x_RE: Tensor, ids_R: Tensor) -> Tensor:
        """Each row through one expert, unweighted."""
        wide = torch.promote_types(x_RE.dtype, torch.float32)
        ones_R1 = torch.ones(len(ids_R), 1, dtype=wide, device=x_RE.device)
        return self._mix(x_RE, ones_R1, ids_R.unsqueeze(1))

    def _mix(self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        return fused_moe(
            x_TE,
            self.gate_up.weight,
            self.down.weight,
            weights_TK,
            ids_TK,
            biases=self._biases(),
            activation="clamped_swiglu" if self.is_stacked else "swiglu",
            packed=(self.gate_up.packed, self.down.packed),
            batch_invariant=self.router.batch_invariant,
        )
