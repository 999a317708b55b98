"""The definition of the model: embedding, decoder layers, final norm, output head.

`forward` takes a flat run of tokens and their positions and leaves everything about sequences to
the attention context, so it serves training (packed) and inference (paged). On a CPU rollouts run
`kernels/cpp/decoder.h`, its transcript in C++; tests/nanoinfer/test_native_decoder.py holds the two
to the same bits.

`forward` stops at the hidden states. The output head is for `logprobs`, which never holds a
tokens x vocabulary tensor, and for `logits`, which the sampler reads; the model alone knows in
which dtype the head is computed, where its prepacked copy lies and over which ranks it is split.

Memory of a model of N linear and embedding weights on a CPU: N parameters and N prepacked copies
of the same dtype (a tied head is packed too), 0.54 GB for 135 M parameters in bf16; within a
training step those of the layers are lent to the activations. The matrices of layers take a byte a
weight in int8, with nothing beside them: 0.22 GB. A run of one
process in which rollouts and training take turns has one model (nanorl/publisher.py).
Left out: how parameters are split over devices (nanoengine.parallel), optimizer state.
Next: layers.py, moe.py, attention.py, hf.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import Int8Weight, int8_linear, linear, pack_int8, pack_weight
from kernels.linear import is_native
from nanoengine.model.attention import AttentionContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import DecoderLayer, Rope, add_norm_rows, neutral_norm, rope_tables
from nanoengine.model.linear import (
    LogprobOptions,
    NoSplit,
    OutputHead,
    PackedLinear,
    QuantizedFormat,
    Slice,
    TensorSplit,
    mark_partial,
    record_of,
)
from nanoengine.model.moe import ExpertSplit, ExpertStack


class Transformer(nn.Module):
    """A model of any family (families.py). Matrices start as zeros: load a folder (hf.py) or
    `init_weights`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        head_dtype: torch.dtype | None = None,
        split: TensorSplit | None = None,
        experts: ExpertSplit | None = None,
        is_int8: bool = False,
    ) -> None:
        """`head_dtype` float32 over a bf16 model computes logits from an fp32 copy of the head:
        bf16 logits move a token's probability by up to 5 %. With `split` or `experts` this is one
        rank's part of the model; `config` stays that of the whole. `is_int8` as after
        `quantize("int8")`, without the memory that it takes to get there."""
        super().__init__()
        self.config = config
        self.split: TensorSplit = NoSplit() if split is None else split
        self.experts = experts
        self._head_dtype = head_dtype
        self._embedding_scale = config.embedding_scale
        vocab = self.split.run(config.vocab_size)
        shape = (vocab[1] - vocab[0], config.hidden_size)
        self.embedding = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        self.layers = nn.ModuleList(
            self._make_layer(index, dtype, device, is_int8) for index in range(config.num_layers)
        )
        self._norm_offset = config.family.norm_offset
        fresh = neutral_norm(config.hidden_size, self._norm_offset, dtype, device)
        self.norm = nn.Parameter(fresh)
        self.head: nn.Parameter | None = None
        if not config.tie_word_embeddings:
            self.head = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        if self.split.size > 1:
            for table in (self.embedding, self.head):
                if table is not None:
                    record_of(table).slice = Slice(0, config.vocab_size, (vocab,))
        if self.split.sequence_parallel:
            mark_partial(self.norm)
        cos, sin = rope_tables(config, dtype, device)
        self.rope_cos: Tensor
        self.rope_sin: Tensor
        self.local_rope_cos: Tensor
        self.local_rope_sin: Tensor
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        if config.local_rope_theta is not None:
            cos, sin = rope_tables(config, dtype, device, is_local=True)
            self.register_buffer("local_rope_cos", cos, persistent=False)
            self.register_buffer("local_rope_sin", sin, persistent=False)
        self.lm_head_packed: Tensor | None = None
        self.int8_head: Int8Weight | None = None
        """In place of `lm_head_packed`, for sampling (`quantize_head`)."""
        self.num_repacks = 0
        """Counts the changes of the weights, for engines that read a model which others train."""
        self._wide_head: Tensor | None = None
        self._batch_invariant = False

    def _make_layer(
        self, index: int, dtype: torch.dtype, device: str, is_int8: bool
    ) -> DecoderLayer:
        layer = DecoderLayer(self.config, index, dtype, device, self.split, self.experts)
        if is_int8:  # now: the parameters of all layers are never there together
            self._check_quantizable("int8", torch.device(device))
            _quantize(layer, "int8")
        return layer

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
        tables = [self.rope_cos, self.rope_sin]
        if self.config.local_rope_theta is not None:
            tables += [self.local_rope_cos, self.local_rope_sin]
        return tuple(table[positions_T] for table in tables)

    def embed(self, ids_T: Tensor) -> Tensor:
        """What the first layer reads, [T, E]."""
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
        residual_TE: Tensor | None = None
        if activation_checkpointing and torch.is_grad_enabled():
            for layer in layers:
                x_TE, residual_TE = checkpoint(
                    layer,
                    x_TE,
                    residual_TE,
                    rope,
                    context,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
        else:
            for layer in layers:
                x_TE, residual_TE = layer(x_TE, residual_TE, rope, context)
        assert residual_TE is not None, "there is at least one layer"
        return x_TE, residual_TE

    def _finish(self, x_TE: Tensor, residual_TE: Tensor, num_rows: int) -> Tensor:
        eps = self.config.rms_norm_eps
        y_TE = add_norm_rows(x_TE, residual_TE, self.norm, eps, self._norm_offset)[0]
        return self.split.enter(y_TE, num_rows)

    def scale_for_head(self, hidden_TE: Tensor) -> Tensor:
        """What the output head multiplies: hidden states divided by `logits_scaling`, so that the
        logits are, by whichever product they come."""
        scaling = self.config.logits_scaling
        return hidden_TE if scaling == 1.0 else hidden_TE / scaling

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Logits [T, V] in `head_dtype`; `logprobs` computes from the same bits."""
        if self.int8_head is not None:
            hidden_TE = self.scale_for_head(hidden_TE).to(self.head_dtype)
            return int8_linear(hidden_TE, self.int8_head)
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
        head, hidden_PE = self._output_head(), self.scale_for_head(hidden_PE)
        return self.split.logprobs(
            hidden_PE, head, ids_P, LogprobOptions() if options is None else options
        )

    @torch.no_grad()
    def likeliest(
        self, hidden_PE: Tensor, k: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(ids [P, k], logp [P, k]) of the k likeliest next tokens, likeliest first. `ValueError`
        for a k that is larger than the vocabulary."""
        if not 1 <= k <= self.config.vocab_size:
            raise ValueError(
                f"k={k}: must be from 1 to the vocabulary's {self.config.vocab_size}; lower it"
            )
        hidden_PE = self.scale_for_head(hidden_PE)
        return self.split.likeliest(hidden_PE, self._output_head(), k, temperature)

    def _output_head(self) -> OutputHead:
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
            if isinstance(module, (PackedLinear, ExpertStack)):
                module.repack()
        self._repack_head()

    def _repack_head(self) -> None:
        self._wide_head = None
        if self.int8_head is not None:
            pack_int8(self.lm_head_weight.detach(), self.head_dtype, self.int8_head)
            return
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
        found = [module for module in self.modules() if isinstance(module, PackedLinear)]
        return [one for one in found if one.fp8 is None and is_native(one.weight)]

    def forget_packed(self) -> None:
        """Drop every prepacked copy: products make them on the fly, for weights that come and go
        (ZeRO-3)."""
        for module in self.modules():
            if isinstance(module, PackedLinear):
                module.packed = None
            elif isinstance(module, ExpertStack):
                module.packed = [None] * len(module.packed)
        self.lm_head_packed = self._wide_head = None

    @property
    def quantization(self) -> QuantizedFormat | None:
        """What `quantize` was called with."""
        for module in self.modules():
            if isinstance(module, PackedLinear):
                if module.int8 is not None:
                    return "int8"
                if module.fp8 is not None:
                    return "fp8"
        return None

    def quantize(self, kind: QuantizedFormat) -> None:
        """Multiply by the matrices of attention and of dense MLPs in 8 bits from now on; they are
        frozen (`PackedLinear.quantize`). fp8: for sampling only; `repack` quantises them again.
        int8: on a CPU; a trainer may read them, for adapters. Router, experts and output head stay
        as they are (but see `quantize_head`)."""
        self._check_quantizable(kind, self.device)
        for layer in self.layers:
            _quantize(layer, kind)

    def quantize_head(self) -> None:
        """Compute logits from an int8 copy of the output head, for sampling only; `repack` renews
        it. The embedding, tied or not, stays."""
        self._check_quantizable("int8", self.device)
        self.lm_head_packed = None
        self.int8_head = pack_int8(self.lm_head_weight.detach(), self.head_dtype)

    def _check_quantizable(self, kind: QuantizedFormat, device: torch.device) -> None:
        if self.split.size > 1 or self.experts is not None:
            raise ValueError(
                f"quantization={kind!r}: this model is split over ranks, and what shares a scale "
                "would be cut apart; use one rank, or leave quantization out"
            )
        if kind == "int8" and device.type != "cpu":
            raise ValueError(
                f"quantization='int8': the model is on {device}, and the product is a CPU's; use "
                "quantization='fp8' there, or device='cpu'"
            )

    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """Fresh normal weights; projections into the residual stream are smaller by √(2·layers),
        as in GPT-2. Norms multiply by 1, biases and sinks are 0. The same seed gives the same
        weights in every dtype and however the model is split. Not of int8 matrices: quantise
        afterwards."""
        assert self.quantization != "int8", "their parameters have no memory"
        generator = torch.Generator().manual_seed(seed)
        residual_std = std / (2 * self.config.num_layers) ** 0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(("bias", "sinks")):
                    parameter.zero_()
                    continue
                if parameter.dim() == 1:
                    parameter.fill_(1.0 - self._norm_offset)
                    continue
                scale = residual_std if name.endswith(("out.weight", "down.weight")) else std
                part = record_of(parameter).slice
                shape = parameter.shape if part is None else part.whole_shape(parameter.shape)
                fresh = torch.randn(shape, generator=generator) * scale
                parameter.copy_(fresh if part is None else part.take(fresh))
        self.repack()


def _quantize(layer: nn.Module, kind: QuantizedFormat) -> None:
    for name in ("qkv", "out", "gate_up", "down"):
        module = getattr(layer, name, None)
        if isinstance(module, PackedLinear):
            module.quantize(kind)
