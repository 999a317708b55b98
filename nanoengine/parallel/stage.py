"""One stage of a pipeline: a run of the model's layers, the embedding before or the head after it.

A stage is the Transformer whose other layers are elsewhere. Parameters keep the names they have in
the whole model, so checkpoints, exports and the optimizer need not know about pipelines. Between
two stages travels one tensor, the residual stream with the last layer's output added to it; the
next stage's first norm would do the same addition, so the bits are those of the whole model.

A tied embedding is held by the first stage (to look tokens up) and by the last (as the head); the
two copies stay equal because their gradients are summed, see `sum_tied_gradients`.
"""

from __future__ import annotations

import dataclasses
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from nanoengine.architectures.moe import ExpertSplit
from nanoengine.formats.families import sees
from nanoengine.model.attention import AttentionContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import DecoderLayer
from nanoengine.model.linear import PackedLinear, TensorSplit
from nanoengine.model.transformer import Transformer, layer_class
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.parameter_record import record_of

_MODEL_CLASS = "nanoengine.formats.hf:model_class"
_SEEING = "nanoengine.vision.seeing_stage:SeeingStage"


class Elsewhere(nn.Module):
    """A layer that another rank holds."""


class Stage(Transformer):
    """Stage `index` of `num_stages`. Matrices start as zeros, as in a Transformer."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        num_stages: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        head_dtype: torch.dtype | None = None,
        split: TensorSplit | None = None,
        experts: ExpertSplit | None = None,
    ) -> None:
        held = split_layers(config.num_layers, num_stages)[index]
        small = self.of_one_layer(config)
        super().__init__(small, dtype, device, head_dtype=head_dtype, split=split, experts=experts)
        self.config = config
        self.index, self.num_stages = index, num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        kind = layer_class(config)
        self.layers = nn.ModuleList(
            kind(config, i, dtype, device, self.split, experts) if i in held else Elsewhere()
            for i in range(config.num_layers)
        )
        self._held = held
        if not (self.is_first or (self.is_last and config.tie_word_embeddings)):
            self.embedding = None  # type: ignore[assignment]
        if not self.is_last:
            self.head = None
            self.norm = None  # type: ignore[assignment]
        if config.tie_word_embeddings and num_stages > 1 and (self.is_first or self.is_last):
            record = record_of(self.embedding)
            record.is_deferred, record.is_copy = True, self.is_last

    @classmethod
    def of_one_layer(cls, config: ModelConfig) -> ModelConfig:
        """The shape of what a stage has beside its layers."""
        dense = (0,) if config.num_experts else ()
        return dataclasses.replace(
            config, num_layers=1, dense_layers=dense, window_layers=(), unroped_layers=()
        )

    @property
    def first_layer(self) -> DecoderLayer:
        layer = self.layers[self._held.start]
        assert isinstance(layer, DecoderLayer)
        return layer

    @property
    def dtype(self) -> torch.dtype:
        return self.first_layer.qkv.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.first_layer.qkv.weight.device

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        context: AttentionContext,
        *,
        x_TE: Tensor | None = None,
        activation_checkpointing: bool = False,
    ) -> Tensor:
        """The last stage gives the hidden states after the final norm, the others what the next
        one takes as `x_TE`. Only the first stage looks at the ids."""
        rope = self.rope_of(positions_T)
        x_TE = self.embed(ids_T) if x_TE is None else x_TE
        layers = [self.layers[i] for i in self._held]
        x_TE, residual_TE = self._run(layers, x_TE, rope, context, activation_checkpointing)
        if self.is_last:
            return self._finish(x_TE, residual_TE, ids_T.shape[0])
        return residual_TE + x_TE

    def boundary(self, num_rows: int, num_more: int = 0) -> Tensor:
        """An empty tensor for what travels between stages, for a micro-batch of so many rows;
        `num_more` travel below those of the stream."""
        if self.split.sequence_parallel:
            num_rows = -(-num_rows // self.split.size)
        shape = (num_rows + num_more, self.config.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def linear_weights(self) -> list[nn.Parameter]:
        """The weights whose gradients can wait."""
        return [m.weight for m in self.modules() if isinstance(m, PackedLinear)]

    def _repack_head(self) -> None:
        if self.is_last:
            super()._repack_head()

    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """The part of what the whole model would draw. Draws the whole model: for tests and small
        models; large ones are loaded."""
        whole = resolve_name(_MODEL_CLASS)(self.config)(
            self.config, self.dtype, str(self.device), split=self.split, experts=self.experts
        )
        whole.init_weights(seed, std)
        values = dict(whole.named_parameters())
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(values[name])
        self.repack()


def make_stages(
    mesh: Mesh,
    config: ModelConfig,
    num_chunks: int = 1,
    dtype: torch.dtype = torch.float32,
    *,
    head_dtype: torch.dtype | None = None,
    split: TensorSplit | None = None,
    experts: ExpertSplit | None = None,
) -> list[Stage]:
    """The stages of this pipeline rank, chunk by chunk."""
    num_ranks, rank = mesh.size("pp"), mesh.rank("pp")
    num_stages = num_ranks * num_chunks
    check_stages(config, num_ranks, num_chunks)
    kind = stage_class(config)
    stages = [
        kind(
            config,
            chunk * num_ranks + rank,
            num_stages,
            dtype,
            str(mesh.device),
            head_dtype=head_dtype,
            split=split,
            experts=experts,
        )
        for chunk in range(num_chunks)
    ]
    if num_ranks == 1 and config.tie_word_embeddings:
        stages[-1].embedding = stages[0].embedding
    return stages


def stage_class(config: ModelConfig) -> type[Stage]:
    """The class of a model's stages: those of one that sees hand on what its tower saw."""
    if not sees(config.model_type):
        return Stage
    found: type[Stage] = resolve_name(_SEEING)
    return found


def check_stages(config: ModelConfig, num_ranks: int, num_chunks: int) -> None:
    """`ValueError` where there are fewer layers than stages."""
    if num_ranks * num_chunks > config.num_layers:
        raise ValueError(
            f"pp={num_ranks} x {num_chunks} chunks: more stages than the {config.num_layers} "
            "layers; choose fewer"
        )


def sum_tied_gradients(mesh: Mesh, config: ModelConfig, stages: list[Stage]) -> None:
    """Add up the gradients of a tied embedding's two copies: the first and the last pipeline rank
    swap theirs and both compute first + last, so the copies stay equal bit for bit."""
    last = mesh.size("pp") - 1
    rank = mesh.rank("pp")
    if not config.tie_word_embeddings or last == 0 or rank not in (0, last):
        return
    parameter = stages[0 if rank == 0 else -1].embedding
    mine = getattr(parameter, "main_grad", None)
    if mine is None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mine = parameter.grad
    other = torch.empty_like(mine)
    peer = last - rank
    mesh.exchange("pp", mine, peer, other, peer).wait()
    mine.add_(other)


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers that each stage holds: equal runs, the remainder to the first stages (the last one
    also has the output head)."""
    if num_stages > num_layers:
        raise ValueError(f"{num_stages} pipeline stages: more than the {num_layers} layers")
    base, extra = divmod(num_layers, num_stages)
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + base + (stage < extra))
    return [range(bounds[i], bounds[i + 1]) for i in range(num_stages)]
