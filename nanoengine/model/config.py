"""The shape of a model, as its layers read it: one frozen record.

The dense decoder (layers.py) reads the first half of it. The second half are switches of single
families, which their layers read (architectures/); they stay as they are for Llama and Qwen.
Left out: how a config.json says all this, and which families have which switch
(formats/config_json.py, formats/families.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from torch import Tensor

_FORMAT = {  # config.json, and the families that there are
    "check": "nanoengine.formats.config_json:check_config",
    "from_folder": "nanoengine.formats.config_json:from_folder",
    "from_hf_dict": "nanoengine.formats.config_json:from_hf_dict",
    "to_hf_dict": "nanoengine.formats.config_json:to_hf_dict",
}
_DENSE = ("llama", "qwen2", "qwen3")


class RopeScaling(Protocol):
    """A change to the frequencies, and to the length of what is rotated."""

    @property
    def magnitude(self) -> float:
        """Rotated queries and keys are multiplied by it."""
        ...

    def frequencies(self, theta: float, dim: int) -> Tensor:
        """[dim / 2] in fp32, radians a position."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a `Transformer`. Ids are token ids; `eos_ids` is a set of ends of turn.
    `ValueError` for a shape that its family does not have."""

    model_type: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    # -- switches of single families
    local_rope_theta: float | None = None
    """The base of the rope of layers with a window, where they have one of their own; its
    frequencies are not scaled."""
    partial_rotary_factor: float = 1.0
    """The part of each head that rotates."""
    unroped_layers: tuple[int, ...] = ()
    """The layers without a rope."""
    sliding_window: int | None = None
    """A token in one of `window_layers` sees the last so many tokens, itself included."""
    window_layers: tuple[int, ...] = ()
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dense_layers: tuple[int, ...] = ()
    """The layers of a mixture of experts that have none."""
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    """Of the scores; None: 1 / sqrt(head_dim)."""
    query_pre_attn_scalar: float | None = None
    """The scores are divided by its root."""
    residual_multiplier: float = 1.0
    """Of what attention and MLP add to the residual stream."""
    logits_scaling: float = 1.0
    """The logits are divided by it."""

    def __post_init__(self) -> None:
        # at once, by name: a shape that its family has not would give plausible, wrong numbers
        resolve_name(_FORMAT["check"])(self)

    @property
    def is_dense(self) -> bool:
        """True where layers.py has the layers of this model: no switch of a family is on."""
        return self.model_type in _DENSE and not self.window_layers

    @property
    def rotary_dim(self) -> int:
        """The numbers of each head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    def is_moe_layer(self, index: int) -> bool:
        """Say whether layer `index` holds a mixture of experts."""
        return self.num_experts > 0 and index not in self.dense_layers

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` of a Hugging Face folder."""
        config: ModelConfig = resolve_name(_FORMAT["from_folder"])(path)
        return config

    @classmethod
    def from_hf_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Translate the fields of a config.json, refusing what a `Transformer` cannot express."""
        config: ModelConfig = resolve_name(_FORMAT["from_hf_dict"])(fields)
        return config

    def to_hf_dict(self) -> dict[str, Any]:
        """The config.json from which `transformers` and `from_hf_dict` build the same model."""
        fields: dict[str, Any] = resolve_name(_FORMAT["to_hf_dict"])(self)
        return fields
