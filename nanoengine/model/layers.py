"""The decoder layer, and the rope tables that all layers share.

Shapes: T tokens of all sequences, E hidden size, F MLP width, H query heads, K key/value heads,
D head dimension, V vocabulary.

Query, key and value share one matrix, and so do gate and up: fewer and larger products
(linear.py). Where the matrices are split over ranks (`split`, see parallel/tensor_parallel.py) a
layer holds its share of the heads and of the MLP and calls on the split before and after them.

`DecoderLayer.forward` is the definition of a layer in every family; what differs is switched by
`config.family` (families.py) and by the fields of the config. On a CPU rollouts run its transcript
in C++, `kernels/cpp/decoder.h`, held to the same bits by tests/nanoinfer/test_native_decoder.py.
Left out: dropout, biases in a dense MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import add_rms_norm, apply_rope, geglu, qk_norm_rope, rms_norm, swiglu
from kernels.linear import InputRecipe
from nanoengine.model.attention import AttentionContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.linear import PackedLinear, TensorSplit, mark_partial, mark_slice
from nanoengine.model.rope import plain_frequencies

if TYPE_CHECKING:
    from nanoengine.model.moe import ExpertSplit


Rope = tuple[Tensor, ...]
"""cos and sin [T, D/2]; then those of layers with a window, where they have a rope of their own."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": swiglu, "gelu_pytorch_tanh": geglu}


def rope_tables(
    config: ModelConfig, dtype: torch.dtype, device: str, *, is_local: bool = False
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D/2] by fp32 arithmetic, as transformers does; fp64 models hold the
    same values in fp64. Pairs that do not rotate come last, with an angle of 0."""
    dim, scaling = config.rotary_dim, None if is_local else config.rope_scaling
    theta = config.local_rope_theta if is_local else config.rope_theta
    assert theta is not None, "asked for where there is one"
    frequencies = plain_frequencies(theta, dim)
    if scaling is not None:
        frequencies = scaling.frequencies(theta, dim)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.magnitude != 1.0:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    still = (config.head_dim - dim) // 2
    if still:
        cos, sin = F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))
    wide = torch.promote_types(dtype, torch.float32)
    return cos.to(device, wide), sin.to(device, wide)


def neutral_norm(width: int, offset: float, dtype: torch.dtype, device: str) -> Tensor:
    """The weight of a norm that scales by 1. Not as a difference: on the device meta arithmetic
    loads TorchDynamo, which takes a second and leaves a folder behind in TMPDIR."""
    return torch.full((width,), 1.0 - offset, dtype=dtype, device=device)


def norm_rows(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMS norm of the last dimension, times weight + offset, which is computed in fp32: a bf16
    weight near 0 would lose its digits in bf16."""
    if not offset:
        return rms_norm(x, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return rms_norm(x.to(wide), weight.to(wide) + offset, eps).to(x.dtype)


def add_norm_rows(
    x_TE: Tensor, residual_TE: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """The norm of residual + x, and that sum."""
    if not offset:
        return add_rms_norm(x_TE, residual_TE, weight, eps)
    total_TE = residual_TE + x_TE
    return norm_rows(total_TE, weight, eps, offset), total_TE


class DecoderLayer(nn.Module):
    """Attention and MLP (dense, or a mixture of experts: moe.py), each between a norm of what it
    reads and a norm of what it adds to the residual stream; a family has one of the two, or both.
    """

    input_norm: nn.Parameter | None
    attention_norm: nn.Parameter | None
    post_norm: nn.Parameter | None
    mlp_norm: nn.Parameter | None
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    sinks: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        device: str,
        split: TensorSplit,
        experts: ExpertSplit | None = None,
    ) -> None:
        super().__init__()
        self.index = index
        self.family = config.family
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.rotary_dim = 0 if index in config.unroped_layers else config.rotary_dim
        self.window = config.window_of(index)
        self.has_local_rope = self.window is not None and config.local_rope_theta is not None
        self.scale = config.attention_scale
        self.multiplier = config.residual_multiplier
        self.split = split
        self.q_width = config.num_heads * config.head_dim // split.size
        self.kv_width = config.num_kv_heads * config.head_dim // split.size
        hidden, mlp = config.hidden_size, config.intermediate_size // split.size

        def add_norm(name: str, width: int, is_wanted: bool) -> None:
            fresh = neutral_norm(width, self.family.norm_offset, dtype, device)
            setattr(self, name, nn.Parameter(fresh) if is_wanted else None)

        norms = self.family.norms
        add_norm("input_norm", hidden, "input_norm" in norms)
        qkv_width = self.q_width + 2 * self.kv_width
        self.qkv = PackedLinear(hidden, qkv_width, config.attention_bias, dtype, device)
        is_wide = self.family.qk_norm == "width"
        add_norm("q_norm", self.q_width if is_wide else self.head_dim, config.qk_norm)
        add_norm("k_norm", self.kv_width if is_wide else self.head_dim, config.qk_norm)
        num_heads = config.num_heads // split.size
        sinks = torch.zeros(num_heads, dtype=dtype, device=device) if self.family.sinks else None
        self.sinks = nn.Parameter(sinks) if sinks is not None else None
        self.out = PackedLinear(self.q_width, hidden, config.attention_output_bias, dtype, device)
        add_norm("attention_norm", hidden, "attention_norm" in norms)
        add_norm("post_norm", hidden, "post_norm" in norms)
        self.moe: nn.Module | None = None
        if config.is_moe_layer(index):
            from nanoengine.model.moe import MoeMlp  # that file builds on this one

            self.moe = MoeMlp(config, dtype, device, split, experts)
        else:
            self.gate_up = PackedLinear(hidden, 2 * mlp, False, dtype, device)
            self.down = PackedLinear(mlp, hidden, False, dtype, device)
        add_norm("mlp_norm", hidden, "mlp_norm" in norms)
        if split.size > 1:
            self._mark_slices(split, mlp)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        rope: Rope,
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor]:
        """`x` is not yet added to `residual` (None before the first layer), nor is the result:
        the next norm adds and normalises at once. `rope` has a row for each token."""
        y_TE, residual_TE = self._read(x_TE, residual_TE, self.input_norm)
        recipe = self._recipe(residual_TE, self.input_norm)
        x_TE = self._written(self._attend(y_TE, recipe, rope, context), self.attention_norm)
        y_TE, residual_TE = self._read(x_TE, residual_TE, self.post_norm)
        recipe = self._recipe(residual_TE, self.post_norm)
        return self._written(self._mlp(y_TE, recipe, rope[0].shape[0]), self.mlp_norm), residual_TE

    def _read(
        self, x_TE: Tensor, residual_TE: Tensor | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What attention or MLP reads, and the residual stream with x added."""
        offset = self.family.norm_offset
        if residual_TE is None:
            return x_TE if norm is None else norm_rows(x_TE, norm, self.eps, offset), x_TE
        if norm is None:
            residual_TE = residual_TE + x_TE
            return residual_TE, residual_TE
        return add_norm_rows(x_TE, residual_TE, norm, self.eps, offset)

    def _recipe(self, residual_TE: Tensor, norm: Tensor | None) -> InputRecipe | None:
        """How what `_read` returned is made again for the backward pass. With an offset the norm
        keeps a wide copy of its input instead; on a GPU the fused norm reads the sum before it is
        rounded; and ranks that share matrices gather the rows."""
        if norm is None or self.family.norm_offset or residual_TE.is_cuda or self.split.size > 1:
            return None
        return InputRecipe(partial(rms_norm, eps=self.eps), (residual_TE, norm))

    def _written(self, x_TE: Tensor, norm: Tensor | None) -> Tensor:
        """What is added to the residual stream."""
        if norm is not None:
            x_TE = norm_rows(x_TE, norm, self.eps, self.family.norm_offset)
        return x_TE if self.multiplier == 1.0 else x_TE * self.multiplier

    def _mlp(self, y_TE: Tensor, recipe: InputRecipe | None, num_rows: int) -> Tensor:
        if self.moe is not None:
            out: Tensor = self.moe(y_TE, num_rows)
            return out
        activate = _ACTIVATIONS[self.family.activation]
        gate_up_T2F = self.gate_up(self.split.enter(y_TE, num_rows), recipe)
        hidden_TF = activate(gate_up_T2F)
        return self.split.multiply_rows(self.down, hidden_TF, InputRecipe(activate, (gate_up_T2F,)))

    def _attend(
        self, y_TE: Tensor, recipe: InputRecipe | None, rope: Rope, context: AttentionContext
    ) -> Tensor:
        y_TE = self.split.enter(y_TE, rope[0].shape[0])
        q, k, v = self.qkv(y_TE, recipe).split((self.q_width, self.kv_width, self.kv_width), -1)
        num_tokens, head_dim = y_TE.shape[0], self.head_dim
        kv_shape = (num_tokens, self.kv_width // head_dim, head_dim)
        if self.family.qk_norm == "width":
            q, k = self._norm_width(q, self.q_norm), self._norm_width(k, self.k_norm)
        q_THD = q.view(num_tokens, self.q_width // head_dim, head_dim)
        q_THD, k_TKD = self._rotate(q_THD, k.view(kv_shape), rope)
        o_THD = context.attend(
            self.index,
            q_THD,
            k_TKD,
            v.view(kv_shape),
            scale=self.scale,
            window=self.window,
            sinks=self.sinks,
        )
        return self.split.multiply_rows(self.out, o_THD.reshape(num_tokens, self.q_width))

    def _rotate(self, q_THD: Tensor, k_TKD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Queries and keys with their norms of heads and their positions."""
        cos, sin = rope[2:] if self.has_local_rope else rope[:2]
        offset = self.family.norm_offset
        if self.family.qk_norm == "head":
            assert self.q_norm is not None and self.k_norm is not None, "made for this family"
            if not offset and self.rotary_dim:
                norms = self.q_norm, self.k_norm
                return qk_norm_rope(q_THD, k_TKD, *norms, cos, sin, None, self.eps)
            q_THD = norm_rows(q_THD, self.q_norm, self.eps, offset)
            k_TKD = norm_rows(k_TKD, self.k_norm, self.eps, offset)
        if not self.rotary_dim:
            return q_THD, k_TKD
        if self.rotary_dim < self.head_dim or self.family.rope_pairs == "neighbours":
            q_THD, k_TKD = self._paired(q_THD), self._paired(k_TKD)
        return apply_rope(q_THD, k_TKD, cos, sin, None)

    def _paired(self, x_THD: Tensor) -> Tensor:
        """The numbers of each head in the order that `apply_rope` rotates: pairs half a head apart,
        those that do not rotate last. Scores do not depend on an order that queries and keys share.
        """
        turned, still = x_THD.split((self.rotary_dim, self.head_dim - self.rotary_dim), -1)
        if self.family.rope_pairs == "neighbours":
            turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2)
        else:
            turned = turned.unflatten(-1, (2, -1))
        return torch.cat((turned, still.unflatten(-1, (2, still.shape[-1] // 2))), -1).flatten(-2)

    def _norm_width(self, x_TQ: Tensor, weight: Tensor | None) -> Tensor:
        """The norm of all heads together, which may be on several ranks."""
        assert weight is not None, "made for this family"
        if self.split.size == 1:
            return rms_norm(x_TQ, weight, self.eps)
        wide = x_TQ.to(torch.promote_types(x_TQ.dtype, torch.float32))
        squares_T1 = wide.square().sum(-1, keepdim=True)
        # every rank uses the sum for its own columns: summed forward, and its gradient backward
        squares_T1 = self.split.enter(self.split.leave(squares_T1), len(x_TQ))
        width = x_TQ.shape[1] * self.split.size
        rstd_T1 = torch.rsqrt(squares_T1 / width + self.eps)
        return (wide * rstd_T1 * weight.to(wide.dtype)).to(x_TQ.dtype)

    def _mark_slices(self, split: TensorSplit, mlp: int) -> None:
        fused = (self.q_width, self.kv_width, self.kv_width)
        for parameter in (self.qkv.weight, self.qkv.bias):
            mark_slice(parameter, 0, fused, split)
        mark_slice(self.out.weight, 1, (self.q_width,), split)
        mark_slice(self.sinks, 0, (self.q_width // self.head_dim,), split)
        if self.moe is None:
            mark_slice(self.gate_up.weight, 0, (mlp, mlp), split)
            mark_slice(self.down.weight, 1, (mlp,), split)
        if self.family.qk_norm == "width":
            mark_slice(self.q_norm, 0, (self.q_width,), split)
            mark_slice(self.k_norm, 0, (self.kv_width,), split)
        else:
            for norm in (self.q_norm, self.k_norm):  # shared by the heads, which are on many ranks
                mark_partial(norm)
        if split.sequence_parallel:
            norms = (self.input_norm, self.attention_norm, self.post_norm, self.mlp_norm)
            for parameter in (*norms, self.out.bias):
                mark_partial(parameter)
