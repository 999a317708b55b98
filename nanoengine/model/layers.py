"""The decoder layer of Llama and Qwen.

Shapes: T tokens of all sequences, E hidden size, F MLP width, H query heads, K key/value heads,
D head dimension, V vocabulary.

Query, key and value share one matrix, and so do gate and up: fewer and larger products
(linear.py). A layer calls on its `split` before and after its matrices, of which it holds a share
where they are split over ranks.

`DecoderLayer.forward` is the definition of a layer; those of other families override the methods
that they compute otherwise (architectures/family_layer.py). On a CPU rollouts run its transcript in
C++, `kernels/cpp/decoder.h`, held to the same bits by tests/nanoinfer/test_native_decoder.py.
Left out: dropout, biases in the MLP; how rope tables are filled (rope_tables.py).
"""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from kernels import add_rms_norm, apply_rope, qk_norm_rope, rms_norm, swiglu
from kernels.linear import InputRecipe
from nanoengine.model.attention import AttentionContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.linear import PackedLinear, TensorSplit

_ROPE_TABLES = "nanoengine.model.rope_tables:rope_tables"

Rope = tuple[Tensor, ...]
"""cos and sin [T, D/2]; then those of layers with a window, where they have a rope of their own."""


class RmsNorm:
    """The norm of hidden states, x / rms(x) · weight."""

    neutral = 1.0
    """The weight that scales by 1."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of the last dimension."""
        return rms_norm(x, weight, self.eps)

    def add_rows(self, x_TE: Tensor, residual_TE: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of residual + x, and that sum."""
        return add_rms_norm(x_TE, residual_TE, weight, self.eps)

    def recipe(self, residual_TE: Tensor, weight: Tensor) -> InputRecipe | None:
        """The backward pass makes the norm again by it, so that it need not be kept."""
        if residual_TE.is_cuda:  # the fused norm read the sum before it was rounded
            return None
        return InputRecipe(partial(rms_norm, eps=self.eps), (residual_TE, weight))


class DecoderLayer(nn.Module):
    """Attention and a gated MLP, each after a norm of what it reads from the residual stream."""

    multiplier = 1.0
    """A family may scale by it what is added to the residual stream."""
    has_local_rope = False
    is_native = True
    """True where `kernels/cpp/decoder.h` has such a layer."""
    activate = staticmethod(swiglu)
    input_norm: nn.Parameter
    post_norm: nn.Parameter
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        device: str,
        split: TensorSplit,
        experts: object | None = None,
    ) -> None:
        """`split` and `experts` are the ranks that share its matrices, and its experts."""
        super().__init__()
        self.index, self.split = index, split
        self.head_dim, self.rotary_dim = config.head_dim, config.rotary_dim
        self.scale = config.head_dim**-0.5
        # attention asks every layer for these two; a family's layers may have them
        self.window: int | None = None
        self.sinks: nn.Parameter | None = None
        self.rms = self.make_norm(config)
        self.q_width = config.num_heads * config.head_dim // split.size
        self.kv_width = config.num_kv_heads * config.head_dim // split.size
        qkv_width = self.q_width + 2 * self.kv_width
        hidden = config.hidden_size
        self._add_norms(config, dtype, device)
        self.qkv = PackedLinear(hidden, qkv_width, config.attention_bias, dtype, device)
        self.out = PackedLinear(self.q_width, hidden, config.attention_output_bias, dtype, device)
        self._add_mlp(config, dtype, device, experts)
        split.mark(self)

    @classmethod
    def make_norm(cls, config: ModelConfig) -> RmsNorm:
        """The norm of hidden states, in the layers and after them."""
        return RmsNorm(config.rms_norm_eps)

    @classmethod
    def embedding_scale(cls, config: ModelConfig) -> float:
        """A family may multiply its embeddings."""
        return 1.0

    @classmethod
    def rope_tables(cls, config: ModelConfig, dtype: torch.dtype, device: str) -> Rope:
        """cos and sin of every position, for all layers."""
        # set-up that a first reader can do without: a table of what apply_rope reads
        tables: Rope = resolve_name(_ROPE_TABLES)(config, dtype, device)
        return tables

    def _add_norms(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        """The norms, in the order of the computation: parameters are counted in it."""
        heads = self.head_dim if config.qk_norm else 0
        widths = {"input_norm": config.hidden_size, "q_norm": heads, "k_norm": heads}
        for name, width in (widths | {"post_norm": config.hidden_size}).items():
            self._add_norm(name, width, dtype, device)

    def _add_norm(self, name: str, width: int, dtype: torch.dtype, device: str) -> None:
        # filled, not computed: on the device meta arithmetic loads TorchDynamo, which takes a
        # second and leaves a folder behind in TMPDIR
        fresh = torch.full((width,), self.rms.neutral, dtype=dtype, device=device)
        setattr(self, name, nn.Parameter(fresh) if width else None)

    def _add_mlp(
        self, config: ModelConfig, dtype: torch.dtype, device: str, experts: object | None
    ) -> None:
        mlp = config.intermediate_size // self.split.size
        self.gate_up = PackedLinear(config.hidden_size, 2 * mlp, False, dtype, device)
        self.down = PackedLinear(mlp, config.hidden_size, False, dtype, device)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        rope: Rope,
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor]:
        """`x` is not yet added to `residual` (None before the first layer), nor is the result:
        the next norm adds and normalises at once. `rope` has a row for each token."""
        if residual_TE is None:  # the first layer: nothing has been added yet
            y_TE, residual_TE = self.rms.rows(x_TE, self.input_norm), x_TE
        else:
            y_TE, residual_TE = self.rms.add_rows(x_TE, residual_TE, self.input_norm)
        x_TE = self._attend(y_TE, self._recipe(residual_TE, self.input_norm), rope, context)
        # what attention gave is added by the norm that follows, in one pass over memory
        y_TE, residual_TE = self.rms.add_rows(x_TE, residual_TE, self.post_norm)
        recipe = self._recipe(residual_TE, self.post_norm)
        return self._mlp(y_TE, recipe, rope[0].shape[0]), residual_TE

    def _recipe(self, residual_TE: Tensor, norm: Tensor) -> InputRecipe | None:
        """The backward pass makes what a matrix reads again by it."""
        # ranks that share matrices gather the rows first: there they are kept
        return None if self.split.size > 1 else self.rms.recipe(residual_TE, norm)

    def _mlp(self, y_TE: Tensor, recipe: InputRecipe | None, num_rows: int) -> Tensor:
        gate_up_T2F = self.gate_up(self.split.enter(y_TE, num_rows), recipe)
        hidden_TF = self.activate(gate_up_T2F)
        # the activation is cheaper to compute twice than to keep: it is the widest tensor here
        recipe = InputRecipe(self.activate, (gate_up_T2F,))
        return self.split.multiply_rows(self.down, hidden_TF, recipe)

    def _attend(
        self, y_TE: Tensor, recipe: InputRecipe | None, rope: Rope, context: AttentionContext
    ) -> Tensor:
        y_TE = self.split.enter(y_TE, rope[0].shape[0])
        # one product for the three: more rows a call, and x is read once
        q, k, v = self.qkv(y_TE, recipe).split((self.q_width, self.kv_width, self.kv_width), -1)
        num_tokens, head_dim = y_TE.shape[0], self.head_dim
        kv_shape = (num_tokens, self.kv_width // head_dim, head_dim)
        q_THD = q.view(num_tokens, self.q_width // head_dim, head_dim)
        q_THD, k_TKD = self._rotate(q_THD, k.view(kv_shape), rope)
        o_THD = context.attend(
            self.index,
            q_THD,
            k_TKD,
            v.view(kv_shape),  # not rotated: a view of the product's rows
            scale=self.scale,
            window=self.window,
            sinks=self.sinks,
        )
        return self.split.multiply_rows(self.out, o_THD.reshape(num_tokens, self.q_width))

    def _rotate(self, q_THD: Tensor, k_TKD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Queries and keys with their norms of heads and their positions."""
        cos, sin = rope
        if self.q_norm is None or self.k_norm is None:
            return apply_rope(q_THD, k_TKD, cos, sin, None)
        norms = self.q_norm, self.k_norm
        return qk_norm_rope(q_THD, k_TKD, *norms, cos, sin, None, self.rms.eps)
