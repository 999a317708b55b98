"""The definition of the model: embedding, decoder layers, final norm, output head.

`forward` takes a flat run of tokens and their positions and leaves everything about sequences to
the attention context, so it serves training (packed) and inference (paged). It stops at the hidden
states. The output head is for `logprobs`, which never holds a tokens x vocabulary tensor, and for
`logits`, which the sampler reads; the model alone knows in which dtype the head is computed, where
its prepacked copy lies and over which ranks it is split.

Memory of a model of N linear and embedding weights on a CPU: N parameters and N prepacked copies
of the same dtype (a tied head is packed too), 0.54 GB for 135 M parameters in bf16; within a
training step those of the layers are lent to the activations. A run of one process in which
rollouts and training take turns has one model (nanorl/learner.py).
Left out: how parameters are split over devices (nanoengine.parallel), optimizer state.
Next: layers.py, linear.py, attention.py; architectures/ for what is not dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import linear, pack_weight
from kernels.linear import is_native
from kernels.memory import all_finite
from nanoengine.model.attention import AttentionContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import DecoderLayer, Rope
from nanoengine.model.linear import LogprobOptions, OutputHead, Packed, PackedLinear, TensorSplit

_LAYERS = {  # by `ModelConfig.is_dense`
    True: "nanoengine.model.layers:DecoderLayer",
    False: "nanoengine.architectures.family_layer:FamilyLayer",
}
_FRESH = "nanoengine.model.fresh_weights:init_weights"
_ROPES = ("rope_cos", "rope_sin", "local_rope_cos", "local_rope_sin")


def layer_class(config: ModelConfig) -> type[DecoderLayer]:
    """The class of a model's layers."""
    found: type[DecoderLayer] = resolve_name(_LAYERS[config.is_dense])
    return found


class Transformer(nn.Module):
    """A model of any family. Matrices start as zeros: load a folder (formats/hf.py) or
    `init_weights`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        head_dtype: torch.dtype | None = None,
        split: TensorSplit | None = None,
        experts: Any = None,
        finish_layer: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """`head_dtype` float32 over a bf16 model computes logits from an fp32 copy of the head:
        bf16 logits move a token's probability by up to 5 %. With `split` or `experts` (an
        `ExpertSplit`) this is one rank's part of the model; `config` stays that of the whole.
        `finish_layer` is called with each layer before the next one takes memory."""
        super().__init__()
        self.config = config
        self.split = TensorSplit() if split is None else split
        self.experts = experts
        self._head_dtype = head_dtype
        kind = layer_class(config)
        self._embedding_scale = kind.embedding_scale(config)
        self.rms = kind.make_norm(config)
        first, end = self.split.run(config.vocab_size)
        shape = (end - first, config.hidden_size)
        self.embedding = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        self.layers = nn.ModuleList()
        for index in range(config.num_layers):
            self.layers.append(kind(config, index, dtype, device, self.split, experts))
            if finish_layer is not None:
                finish_layer(self.layers[index])
        fresh = torch.full((config.hidden_size,), self.rms.neutral, dtype=dtype, device=device)
        self.norm = nn.Parameter(fresh)
        self.head: nn.Parameter | None = None
        if not config.tie_word_embeddings:
            self.head = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        tables = kind.rope_tables(config, dtype, device)
        self._ropes = _ROPES[: len(tables)]
        for name, table in zip(self._ropes, tables, strict=True):
            self.register_buffer(name, table, persistent=False)  # in no file: computed anew
        self.lm_head_packed: Tensor | None = None
        self.int8_head: nn.Module | None = None
        """A copy to sample with in place of `lm_head_packed` (architectures/quantized.py)."""
        self.num_repacks = 0
        """Counts the changes of the weights, for engines that read a model which others train."""
        self._wide_head: Tensor | None = None
        self._batch_invariant = False
        self.split.mark(self)

    @property
    def lm_head_weight(self) -> nn.Parameter:
        """[V, E]; the embedding itself where the two are tied."""
        return self.embedding if self.head is None else self.head

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def head_dtype(self) -> torch.dtype:
        """The dtype of the logits; follows the parameters unless set. Set it, then `repack`."""
        return self.dtype if self._head_dtype is None else self._head_dtype

    @head_dtype.setter
    def head_dtype(self, dtype: torch.dtype | None) -> None:
        self._head_dtype = dtype

    @property
    def batch_invariant(self) -> bool:
        """True if a token's log-prob has the same bits on a GPU whatever it is batched with, in
        both engines; on a CPU it always has. Engines set it where they are `deterministic`, and
        hand it on to the attention and the output head. Left out: a model split over ranks, whose
        sums are the ranks' too."""
        return self._batch_invariant

    @batch_invariant.setter
    def batch_invariant(self, value: bool) -> None:
        self._batch_invariant = value
        for module in self.modules():
            if isinstance(module, PackedLinear):
                module.batch_invariant = value

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        context: AttentionContext,
        *,
        activation_checkpointing: bool = False,
    ) -> Tensor:
        """Hidden states [T, E] after the final norm.

        `activation_checkpointing` keeps only each layer's input for the backward pass and runs
        the layer again there: the same gradients bit for bit, about a third more work.
        """
        rope = self.rope_of(positions_T)
        x_TE = self.embed(ids_T)
        x_TE, residual_TE = self._run(self.layers, x_TE, rope, context, activation_checkpointing)
        return self._finish(x_TE, residual_TE, ids_T.shape[0])

    def rope_of(self, positions_T: Tensor) -> Rope:
        """The rows of the rope tables that the layers read."""
        return tuple(getattr(self, name)[positions_T] for name in self._ropes)

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return what the first layer reads, [T, E]."""
        x_TE = self.split.embed(ids_T, self.embedding, self.config.vocab_size)
        if self._embedding_scale == 1.0:
            return x_TE
        # rounded to the model's dtype first, as in transformers
        return x_TE * torch.tensor(self._embedding_scale, dtype=x_TE.dtype).item()

    def _run(
        self,
        layers: Iterable[nn.Module],
        x_TE: Tensor,
        rope: Rope,
        context: AttentionContext,
        activation_checkpointing: bool,
    ) -> tuple[Tensor, Tensor]:
        # two tensors from layer to layer: the stream, and what is to be added to it
        residual_TE: Tensor | None = None
        recomputes = activation_checkpointing and torch.is_grad_enabled()
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        for layer in layers:
            run = partial(again, layer) if recomputes else layer
            x_TE, residual_TE = run(x_TE, residual_TE, rope, context)
        assert residual_TE is not None, "there is at least one layer"
        return x_TE, residual_TE

    def _finish(self, x_TE: Tensor, residual_TE: Tensor, num_rows: int) -> Tensor:
        # the last layer's output is not in the residual stream yet (`DecoderLayer.forward`)
        y_TE = self.rms.add_rows(x_TE, residual_TE, self.norm)[0]
        return self.split.enter(y_TE, num_rows)

    def scale_for_head(self, hidden_TE: Tensor) -> Tensor:
        """Divide hidden states by `logits_scaling`, so that the logits are, by whichever product
        they come."""
        scaling = self.config.logits_scaling
        return hidden_TE if scaling == 1.0 else hidden_TE / scaling

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Logits [T, V] in `head_dtype`; `logprobs` computes from the same bits."""
        if self.int8_head is not None:
            logits: Tensor = self.int8_head(self.scale_for_head(hidden_TE))
            return logits
        weight: Tensor = self.lm_head_weight
        if self.head_dtype != self.dtype:
            if self._wide_head is None:  # made here and kept until `repack`: a trainer never asks
                with torch.inference_mode(False):  # others may ask outside of it
                    self._wide_head = weight.detach().to(self.head_dtype)
            weight = self._wide_head
        logits = linear(
            self.scale_for_head(hidden_TE).to(weight.dtype),
            weight,
            packed=self.lm_head_packed,
            batch_invariant=self.batch_invariant,
        )
        return self.split.gather_columns(logits, self.config.vocab_size)

    def logprobs(
        self, hidden_PE: Tensor, ids_P: Tensor, options: LogprobOptions | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """logp [P] of each id (nats, fp32 or wider, of the tempered distribution) given the hidden
        state that predicts it, and the entropy [P] of that distribution if it is asked for. Of
        several ids for each state, [P, M], logp [P, M]. Differentiable."""
        head, hidden_PE = self.output_head(), self.scale_for_head(hidden_PE)
        return self.split.logprobs(
            hidden_PE, head, ids_P, LogprobOptions() if options is None else options
        )

    def output_head(self) -> OutputHead:
        """This rank's part of the head, with its prepacked copy."""
        assert self.int8_head is None, "a trainer's head, or a scorer's, is not quantised"
        return OutputHead(
            self.lm_head_weight,
            self.lm_head_packed,
            self.head_dtype,
            self.config.vocab_size,
            self.batch_invariant,
        )

    def repack(self) -> None:
        """Refresh the prepacked copies in place. Call it after any change to a weight: the forward
        pass reads the copies, so without it the old weights keep answering."""
        self.num_repacks += 1  # first: whoever looks on may not miss one that was cut off
        for module in self.modules():
            if isinstance(module, Packed):
                module.repack()
        self._repack_head()

    def _repack_head(self) -> None:
        self._wide_head = None
        if self.int8_head is not None:  # a copy that is renewed like those of matrices
            return
        # also of a tied head: an embedding is looked up by rows, and a product reads panels
        head = self.lm_head_weight.detach().to(self.head_dtype)
        self.lm_head_packed = pack_weight(head, self.lm_head_packed)

    def lend_packed(self) -> None:
        """Free the prepacked copies of the layers' matrices for as long as products have so many
        rows that each lays its weight out for itself in no more time, as in training; where that is
        in C++. `repack` brings them back, and `restore_packed`."""
        for module in self._packed_linears():
            module.packed = None

    def restore_packed(self) -> None:
        """Bring back what `lend_packed` freed, of weights that are as they were."""
        for module in self._packed_linears():
            if module.packed is None:
                module.repack()

    def _packed_linears(self) -> list[PackedLinear]:
        """Those whose copies come and go cheaply."""
        found = [one for one in self.modules() if type(one) is PackedLinear]  # none in 8 bits
        return [one for one in found if is_native(one.weight)]

    @property
    def quantization(self) -> str | None:
        """The format of matrices that are not in the model's dtype, fp8 or int8."""
        matrices = (one for one in self.modules() if isinstance(one, PackedLinear))
        return next((one.format for one in matrices if one.format is not None), None)

    def check_finite(self, outcome: str) -> None:
        """`ValueError`, which ends with `outcome`, names a tensor that holds NaN or infinity.
        Without this a model would go on computing NaN without an error."""
        weights = [one.detach() for one in self.parameters()]
        if self.quantization is None and all(all_finite(weights)):
            return
        # only now by name: the names are Hugging Face's, and their values lie in slices of ours
        resolve_name("nanoengine.formats.hf:check_held")(self, outcome)

    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """Draw fresh normal weights of `std` (fresh_weights.py)."""
        resolve_name(_FRESH)(self, seed, std)
