"""The decoder layer of every family that is not plain Llama or Qwen: what `ModelFamily` switches.

A family may norm what a layer adds to the residual stream, add to the weights of its norms, norm
all heads together, rotate a part of each head, give some layers a window with a rope of its own or
no rope, weigh softmaxes with sinks, scale what it adds, and have a mixture of experts (moe.py) in
place of the MLP. `FamilyLayer` reads these switches (formats/families.py, and the fields of the
config); all else is the dense layer's.
Shapes: T tokens of all sequences, E hidden size, Q width of all heads, H heads, K key/value heads,
D head dimension.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import apply_rope, geglu, qk_norm_rope, rms_norm, swiglu
from kernels.linear import InputRecipe
from nanoengine.architectures.moe import ExpertSplit, MoeMlp
from nanoengine.formats.families import family_of
from nanoengine.model.attention import AttentionContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import DecoderLayer, RmsNorm, Rope, cos_and_sin, plain_frequencies
from nanoengine.model.linear import TensorSplit

_ACTIVATIONS = {"silu": swiglu, "gelu_pytorch_tanh": geglu}


class OffsetNorm(RmsNorm):
    """A norm that multiplies by weight + offset, which is computed in fp32: a bf16 weight near 0
    would lose its digits in bf16."""

    def __init__(self, eps: float, offset: float) -> None:
        super().__init__(eps)
        self.offset, self.neutral = offset, 1.0 - offset

    def rows(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), weight.to(wide) + self.offset, self.eps).to(x.dtype)

    def add_rows(self, x_TE: Tensor, residual_TE: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total_TE = residual_TE + x_TE
        return self.rows(total_TE, weight), total_TE

    def recipe(self, residual_TE: Tensor, weight: Tensor) -> InputRecipe | None:
        """None: the norm keeps a wide copy of its input instead."""
        return None


def attention_scale(config: ModelConfig) -> float:
    """The factor of the attention scores, 1/√D unless the config has another."""
    if config.attention_multiplier is not None:
        return config.attention_multiplier
    divisor = config.query_pre_attn_scalar
    return float((config.head_dim if divisor is None else divisor) ** -0.5)


class FamilyLayer(DecoderLayer):
    """Attention and MLP (dense, or a mixture of experts), each between a norm of what it reads and
    a norm of what it adds to the residual stream; a family has one of the two, or both."""

    attention_norm: nn.Parameter | None
    mlp_norm: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        device: str,
        split: TensorSplit,
        experts: object | None = None,
    ) -> None:
        self.family = family_of(config.model_type)
        super().__init__(config, index, dtype, device, split, experts)
        self.rotary_dim = 0 if index in config.unroped_layers else config.rotary_dim
        self.window = config.sliding_window if index in config.window_layers else None
        self.has_local_rope = self.window is not None and config.local_rope_theta is not None
        self.scale = attention_scale(config)
        self.multiplier = config.residual_multiplier
        self.activate: Any = _ACTIVATIONS[self.family.activation]
        self.is_native = self._is_native()

    def _is_native(self) -> bool:
        family = self.family
        has_whole_rope = self.rotary_dim == self.head_dim
        has_no_rope = self.rotary_dim == 0 and self.q_norm is None
        return (
            set(family.norms) == {"input_norm", "post_norm"}
            and not family.norm_offset
            and family.qk_norm != "width"
            and family.activation == "silu"
            and family.rope_pairs == "halves"
            and (has_whole_rope or has_no_rope)
            and not self.has_local_rope
            and not family.sinks
            and self.moe is None
        )

    @classmethod
    def make_norm(cls, config: ModelConfig) -> RmsNorm:
        offset = family_of(config.model_type).norm_offset
        return OffsetNorm(config.rms_norm_eps, offset) if offset else super().make_norm(config)

    @classmethod
    def embedding_scale(cls, config: ModelConfig) -> float:
        if family_of(config.model_type).embeds_by_root:
            return float(config.hidden_size**0.5)
        return config.embedding_multiplier

    @classmethod
    def rope_tables(cls, config: ModelConfig, dtype: torch.dtype, device: str) -> Rope:
        """Those of layers with a window follow, where they have a rope of their own. Pairs that do
        not rotate come last, with an angle of 0."""
        tables = super().rope_tables(config, dtype, device)
        theta = config.local_rope_theta
        if theta is not None:
            frequencies = plain_frequencies(theta, config.rotary_dim)
            tables += cos_and_sin(config, frequencies, 1.0, dtype, device)
        still = (config.head_dim - config.rotary_dim) // 2
        if not still:
            return tables
        return tuple(F.pad(x, (0, still), value=1.0 - i % 2) for i, x in enumerate(tables))

    def _add_norms(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        norms, hidden = self.family.norms, config.hidden_size

        def add(name: str) -> None:
            self._add_norm(name, hidden if name in norms else 0, dtype, device)

        is_wide = self.family.qk_norm == "width"
        q_width, kv_width = self.q_width, self.kv_width
        heads = (q_width, kv_width) if is_wide else (self.head_dim, self.head_dim)
        add("input_norm")
        for name, width in zip(("q_norm", "k_norm"), heads, strict=True):
            self._add_norm(name, width if config.qk_norm else 0, dtype, device)
        if self.family.sinks:
            num_heads = config.num_heads // self.split.size
            self.sinks = nn.Parameter(torch.zeros(num_heads, dtype=dtype, device=device))
        for name in ("attention_norm", "post_norm", "mlp_norm"):
            add(name)

    def _add_mlp(
        self, config: ModelConfig, dtype: torch.dtype, device: str, experts: object | None
    ) -> None:
        self.moe: MoeMlp | None = None
        if not config.is_moe_layer(self.index):
            super()._add_mlp(config, dtype, device, experts)
            return
        theirs = cast("ExpertSplit | None", experts)
        self.moe = MoeMlp(config, dtype, device, self.split, theirs)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        rope: Rope,
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor]:
        y_TE, residual_TE = self._read(x_TE, residual_TE, self.input_norm)
        recipe = self._recipe(residual_TE, self.input_norm)
        x_TE = self._written(self._attend(y_TE, recipe, rope, context), self.attention_norm)
        y_TE, residual_TE = self._read(x_TE, residual_TE, self.post_norm)
        recipe = self._recipe(residual_TE, self.post_norm)
        return self._written(self._mlp(y_TE, recipe, rope[0].shape[0]), self.mlp_norm), residual_TE

    def _read(
        self, x_TE: Tensor, residual_TE: Tensor | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The input of attention or MLP, normed where there is a norm, and the residual stream with
        x added."""
        if residual_TE is None:
            return x_TE if norm is None else self.rms.rows(x_TE, norm), x_TE
        if norm is None:
            residual_TE = residual_TE + x_TE
            return residual_TE, residual_TE
        return self.rms.add_rows(x_TE, residual_TE, norm)

    def _recipe(self, residual_TE: Tensor, norm: Tensor | None) -> InputRecipe | None:
        return None if norm is None else super()._recipe(residual_TE, norm)

    def _written(self, x_TE: Tensor, norm: Tensor | None) -> Tensor:
        """The output of attention or MLP as it is added to the residual stream, normed and scaled
        where the family does so."""
        if norm is not None:
            x_TE = self.rms.rows(x_TE, norm)
        return x_TE if self.multiplier == 1.0 else x_TE * self.multiplier

    def _mlp(self, y_TE: Tensor, recipe: InputRecipe | None, num_rows: int) -> Tensor:
        if self.moe is None:
            return super()._mlp(y_TE, recipe, num_rows)
        out: Tensor = self.moe(y_TE, num_rows)
        return out

    def _rotate(self, q_THD: Tensor, k_TKD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        cos, sin = rope[2:] if self.has_local_rope else rope[:2]
        kind = self.family.qk_norm
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm, self.k_norm
            if kind == "head" and type(self.rms) is RmsNorm and self.rotary_dim:
                return qk_norm_rope(q_THD, k_TKD, *norms, cos, sin, None, self.rms.eps)
            norm = self._norm_width if kind == "width" else self.rms.rows
            q_THD, k_TKD = norm(q_THD, norms[0]), norm(k_TKD, norms[1])
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

    def _norm_width(self, x_THD: Tensor, weight: Tensor) -> Tensor:
        """The norm of all heads together, which may be on several ranks."""
        x_TQ = x_THD.flatten(1)
        if self.split.size == 1:
            return rms_norm(x_TQ, weight, self.rms.eps).view(x_THD.shape)
        wide = x_TQ.to(torch.promote_types(x_TQ.dtype, torch.float32))
        squares_T1 = wide.square().sum(-1, keepdim=True)
        # every rank uses the sum for its own columns: summed forward, and its gradient backward
        squares_T1 = self.split.enter(self.split.leave(squares_T1), len(x_TQ))
        width = x_TQ.shape[1] * self.split.size
        rstd_T1 = torch.rsqrt(squares_T1 / width + self.rms.eps)
        return (wide * rstd_T1 * weight.to(wide.dtype)).to(x_TQ.dtype).view(x_THD.shape)
