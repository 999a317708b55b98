"""The decoder layer, and the rope tables that all layers share.

Shapes: T tokens of all sequences, E hidden size, F MLP width, H query heads, K key/value heads,
D head dimension, V vocabulary.

Query, key and value share one matrix, and so do gate and up: fewer and larger products
(linear.py). Where the matrices are split over ranks (`split`, see parallel/tensor_parallel.py) a
layer holds its share of the heads and of the MLP and calls on the split before and after them.

`DecoderLayer.forward` is the definition of a layer. On a CPU rollouts run its transcript in C++,
`kernels/cpp/decoder.h`, held to the same bits by tests/nanoinfer/test_native_decoder.py.
Left out: dropout, biases in the MLP.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kernels import (
    add_rms_norm,
    apply_rope,
    qk_norm_rope,
    rms_norm,
    swiglu,
)
from nanoengine.model.attention import AttentionContext
from nanoengine.model.config import Llama3Rope, ModelConfig
from nanoengine.model.linear import PackedLinear, TensorSplit, mark_partial, mark_slice

if TYPE_CHECKING:
    from nanoengine.model.moe import ExpertSplit


def rope_tables(config: ModelConfig, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D/2] by fp32 arithmetic, as transformers does; fp64 models hold the
    same values in fp64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _scale_llama3(frequencies, config.rope_scaling)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(device, wide), angles.sin().to(device, wide)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Meta's llama-models `apply_scaling`, in wavelengths."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    ramp = (scaling.original_max_position_embeddings / wavelengths - low) / (high - low)
    ramp = ramp.clamp(0.0, 1.0)
    scaled = (1 - ramp) * frequencies / scaling.factor + ramp * frequencies
    scaled = torch.where(ramp <= 0, frequencies / scaling.factor, scaled)
    return torch.where(ramp >= 1, frequencies, scaled)


class DecoderLayer(nn.Module):
    """Attention and MLP (dense, or a mixture of experts: moe.py), each after a norm and added to
    the residual stream."""

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
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.window: int | None = None
        self.scale = config.head_dim**-0.5
        self.split = split
        self.q_width = config.num_heads * config.head_dim // split.size
        self.kv_width = config.num_kv_heads * config.head_dim // split.size
        hidden, mlp = config.hidden_size, config.intermediate_size // split.size
        qkv_width = self.q_width + 2 * self.kv_width
        self.input_norm = nn.Parameter(torch.ones(hidden, dtype=dtype, device=device))
        self.qkv = PackedLinear(hidden, qkv_width, config.attention_bias, dtype, device)
        self.q_norm: nn.Parameter | None = None
        self.k_norm: nn.Parameter | None = None
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(self.head_dim, dtype=dtype, device=device))
            self.k_norm = nn.Parameter(torch.ones(self.head_dim, dtype=dtype, device=device))
        self.out = PackedLinear(self.q_width, hidden, config.attention_output_bias, dtype, device)
        self.post_norm = nn.Parameter(torch.ones(hidden, dtype=dtype, device=device))
        self.moe: nn.Module | None = None
        if config.is_moe_layer(index):
            from nanoengine.model.moe import MoeMlp  # that file builds on this one

            self.moe = MoeMlp(config, dtype, device, split, experts)
        else:
            self.gate_up = PackedLinear(hidden, 2 * mlp, False, dtype, device)
            self.down = PackedLinear(mlp, hidden, False, dtype, device)
        if split.size > 1:
            self._mark_slices(split, mlp)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        rope: tuple[Tensor, Tensor],
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor]:
        """`x` is not yet added to `residual` (None before the first layer), nor is the result:
        the next norm adds and normalises at once. `rope` is cos and sin
        of each token, [T, D/2]."""
        if residual_TE is None:
            residual_TE, y_TE = x_TE, rms_norm(x_TE, self.input_norm, self.eps)
        else:
            y_TE, residual_TE = add_rms_norm(x_TE, residual_TE, self.input_norm, self.eps)
        x_TE = self._attend(y_TE, rope, context)
        y_TE, residual_TE = add_rms_norm(x_TE, residual_TE, self.post_norm, self.eps)
        if self.moe is not None:
            return self.moe(y_TE, rope[0].shape[0]), residual_TE
        y_TE = self.split.enter(y_TE, rope[0].shape[0])
        return self.split.multiply_rows(self.down, swiglu(self.gate_up(y_TE))), residual_TE

    def _attend(
        self, y_TE: Tensor, rope: tuple[Tensor, Tensor], context: AttentionContext
    ) -> Tensor:
        y_TE = self.split.enter(y_TE, rope[0].shape[0])
        q, k, v = self.qkv(y_TE).split((self.q_width, self.kv_width, self.kv_width), -1)
        num_tokens, head_dim = y_TE.shape[0], self.head_dim
        kv_shape = (num_tokens, self.kv_width // head_dim, head_dim)
        q_THD = q.view(num_tokens, self.q_width // head_dim, head_dim)
        k_TKD = k.view(kv_shape)
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm, self.k_norm
            q_THD, k_TKD = qk_norm_rope(q_THD, k_TKD, *norms, *rope, None, self.eps)
        else:
            q_THD, k_TKD = apply_rope(q_THD, k_TKD, *rope, None)
        o_THD = context.attend(
            self.index, q_THD, k_TKD, v.view(kv_shape), scale=self.scale, window=self.window
        )
        return self.split.multiply_rows(self.out, o_THD.reshape(num_tokens, self.q_width))

    def _mark_slices(self, split: TensorSplit, mlp: int) -> None:
        fused = (self.q_width, self.kv_width, self.kv_width)
        for parameter in (self.qkv.weight, self.qkv.bias):
            mark_slice(parameter, 0, fused, split)
        mark_slice(self.out.weight, 1, (self.q_width,), split)
        if self.moe is None:
            mark_slice(self.gate_up.weight, 0, (mlp, mlp), split)
            mark_slice(self.down.weight, 1, (mlp,), split)
        for norm in (self.q_norm, self.k_norm):  # shared by the heads, which are on many ranks
            mark_partial(norm)
        if split.sequence_parallel:
            for parameter in (self.input_norm, self.post_norm, self.out.bias):
                mark_partial(parameter)
