"""Matrices and their products, in one piece or as the parts that ranks hold.

A CPU keeps each matrix twice, as the parameter (for the backward pass and the optimizer) and in
oneDNN's block layout (for the forward pass of both engines; `kernels/linear.py` says why). The
second copy is no parameter and in no state dict; whoever changes a weight calls
`Transformer.repack`.

The layers ask their `split` before and after their matrices, and never whether there is one:
`TensorSplit` is that of a model in one piece, parallel/tensor_parallel.py that of ranks.
Left out: matrices in 8 bits (architectures/quantized.py).
Shapes: T tokens, E hidden size, V vocabulary, P rows that are scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

import kernels
from kernels import add_rows_, linear, linear_logprob, pack_weight
from kernels.cpp.decoder import DecoderMatrix
from kernels.linear import InputRecipe


class MatrixChange(Protocol):
    """The part of a product that does not come from the weight: adapters that requests name."""

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """y with the changes added, which may be y itself."""
        ...


class Packed(nn.Module):
    """A module that computes from prepacked copies of its weights."""

    def repack(self) -> None:
        """The weights have changed: renew the copies, in their place."""

    def forget(self) -> None:
        """Drop the copies: products make them on the fly."""


class PackedLinear(Packed):
    """x · weightᵀ + bias, with the weight's prepacked copy beside it."""

    format: ClassVar[str | None] = None
    """The name of another format than the parameter's that it multiplies in."""

    def __init__(
        self, num_in: int, num_out: int, has_bias: bool, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        # zeros: a folder or `init_weights` fills them, and pages that nobody writes cost nothing
        self.weight = nn.Parameter(torch.zeros(num_out, num_in, dtype=dtype, device=device))
        bias = torch.zeros(num_out, dtype=dtype, device=device) if has_bias else None
        self.bias = nn.Parameter(bias) if bias is not None else None
        self.packed: Tensor | None = None
        self.batch_invariant = False  # the model's
        self.adapters: MatrixChange | None = None
        """What the step's requests add; set by an inference engine."""

    def forward(self, x: Tensor, recipe: InputRecipe | None = None) -> Tensor:
        """With `recipe` the backward pass makes x again."""
        y = self._multiply(x, recipe)
        # after the product, not in the weight: each row may have asked for another adapter
        return y if self.adapters is None else self.adapters.add_to(y, x)

    def _multiply(self, x: Tensor, recipe: InputRecipe | None) -> Tensor:
        return linear(
            x,
            self.weight,
            self.bias,
            packed=self.packed,
            recipe=recipe,
            batch_invariant=self.batch_invariant,
        )

    @property
    def device(self) -> torch.device:
        """The device that the weight is on."""
        return self.weight.device

    def native(self) -> DecoderMatrix | None:
        """The matrix as the decoder in C++ reads it, by address; None where it cannot."""
        return None if self.packed is None else DecoderMatrix(self.packed, None, self.bias)

    def repack(self) -> None:
        self.packed = pack_weight(self.weight, self.packed)

    def forget(self) -> None:
        self.packed = None


@dataclass(frozen=True)
class OutputHead:
    """A rank's part of the output head, as products read it. `dtype` is that of the logits."""

    weight_VE: Tensor
    packed: Tensor | None
    dtype: torch.dtype
    vocab_size: int  # of the whole head
    batch_invariant: bool = False


@dataclass(frozen=True)
class LogprobOptions:
    """The options of the output head: the temperature of the log-probs, and what is computed beside
    them."""

    temperature: float = 1.0
    entropy: bool = False
    expected_grad: Tensor | None = None
    """[P], what the backward pass is expected to bring by logp; a split may save time with it
    (kernels/linear_logprob.py)."""


class TensorSplit:
    """The answers that a layer gets about the ranks that share its matrices; these are the plain
    ones of a model in one piece."""

    size = 1
    rank = 0
    sequence_parallel = False
    """True where ranks share the rows between matrices out, too."""

    def mark(self, module: nn.Module) -> None:
        """Note on the parameters of a new layer, or model, which part of the whole they are."""

    def run(self, whole: int) -> tuple[int, int]:
        """This rank's indices of `whole` items."""
        return 0, whole

    def enter(self, x: Tensor, num_rows: int) -> Tensor:
        """Return the rows every rank needs, `num_rows` of them, for matrices split by columns."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, after matrices split by rows."""
        return x

    def multiply_rows(
        self, matrix: PackedLinear, x: Tensor, recipe: InputRecipe | None = None
    ) -> Tensor:
        """The product with a matrix split by rows, bias included, summed over the ranks."""
        out: Tensor = matrix(x, recipe)
        return out

    def embed(self, ids_T: Tensor, weight_VE: Tensor, vocab_size: int) -> Tensor:
        """Rows of the embedding, whose part `weight_VE` is."""
        return embed(ids_T, weight_VE)

    def gather_columns(self, x: Tensor, whole: int) -> Tensor:
        """The ranks' columns side by side, without gradient."""
        return x

    def logprobs(
        self, hidden_PE: Tensor, head: OutputHead, ids_P: Tensor, options: LogprobOptions
    ) -> tuple[Tensor, Tensor | None]:
        """logp [P] of the ids (and entropy [P], if asked for), over the whole vocabulary; of ids
        [P, M], logp [P, M]."""
        scored = linear_logprob(
            hidden_PE,
            head.weight_VE,
            ids_P,
            temperature=options.temperature,
            return_entropy=options.entropy,
            packed=head.packed,
            logits_dtype=head.dtype,
            expected_grad=options.expected_grad,
            batch_invariant=head.batch_invariant,
        )
        return scored if isinstance(scored, tuple) else (scored, None)

    def likeliest(
        self, hidden_PE: Tensor, head: OutputHead, k: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(ids [P, k], logp [P, k]) of the k likeliest tokens of the whole vocabulary, likeliest
        first. No gradient."""
        return kernels.linear_topk(
            hidden_PE,
            head.weight_VE,
            k,
            temperature=temperature,
            packed=head.packed,
            logits_dtype=head.dtype,
        )


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, ids_T: Tensor, weight_VE: Tensor
    ) -> Tensor:
        ctx.save_for_backward(ids_T, weight_VE)
        return weight_VE.index_select(0, ids_T)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_TE: Tensor
    ) -> tuple[None, Tensor | None]:
        ids_T, weight_VE = ctx.saved_tensors  # type: ignore[attr-defined]
        target = getattr(weight_VE, "main_grad", None)
        if isinstance(target, Tensor):  # an optimizer's buffer: autograd need not see it
            add_rows_(target, ids_T, grad_TE)
            return None, None
        # wide: thousands of tokens may add to one row, and bf16 would drop the small ones
        wide = torch.promote_types(grad_TE.dtype, torch.float32)
        target = torch.zeros(weight_VE.shape, dtype=wide, device=grad_TE.device)
        add_rows_(target, ids_T, grad_TE)
        return None, target.to(weight_VE.dtype)


def embed(ids_T: Tensor, weight_VE: Tensor) -> Tensor:
    """Rows of the embedding. The gradient is summed in fp32, into `weight.main_grad` (added to
    what the tied output head left there) where that exists."""
    # a look-up without the graph where nobody asks for a gradient, as in every decode step
    if torch.is_grad_enabled() and weight_VE.requires_grad:
        out: Tensor = _Embedding.apply(ids_T, weight_VE)
        return out
    return weight_VE.index_select(0, ids_T)
