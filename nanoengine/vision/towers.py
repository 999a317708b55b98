"""The differences between vision towers: one record for each family, and the shape of one tower.

There is one definition of a tower (tower.py). A `TowerFamily` says of which parts it is made, under
which names Hugging Face keeps the tensors and the fields of a config.json; a `VisionConfig` is the
`vision_config` of one, whose fields are read strictly: one that is not known may change numbers.

Left out: towers that see films.
Next: tower.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TowerFamily:
    """The parts and names of one family of towers. What all of them share is the tower's
    definition: patches, and blocks of attention and an MLP with biases, each behind a norm. A
    family that differs there adds a switch."""

    model_type: str
    """The one of its `vision_config` as transformers 5 writes it; older folders have the model's,
    which is the key of this record."""

    # -- the computation
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    activation: Literal["gelu_pytorch_tanh", "silu"] = "gelu_pytorch_tanh"
    """Of the MLP of blocks; silu is that of a gate, which a second matrix makes."""
    patch_bias: bool = True
    has_frames: bool = True
    """A patch has frames, of which a still picture repeats its own."""
    positions: Literal["stretched", "bucketed", "none"] = "stretched"
    """How the table of learned positions is laid over a picture: stretched, so that a patch lies
    between four of its rows, or each patch takes the one on which its corner falls; or there is
    no such table."""
    has_rope: bool = True
    """Queries and keys turn by row and column, too."""
    has_windows: bool = False
    """In most blocks a patch sees those of its own window alone."""
    has_last_norm: bool = False
    """The residual stream is normed behind the last block."""
    merger: Literal["mlp", "linear"] = "mlp"
    """What makes tokens of squares of patches: a norm and two matrices, or one matrix."""
    deepstack: bool = False
    """Further mergers, which norm what was merged, read the residual stream after some blocks."""

    # -- the tensors
    prefix: str
    """What the tensors' names begin with."""
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Parts of our parameters' names that Hugging Face calls otherwise; several, where one of our
    matrices holds several of theirs."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are no part of the tower there: our name and theirs, whole."""

    # -- config.json
    fields: Mapping[str, str]
    """Our fields of `VisionConfig`, and theirs in `vision_config`."""
    outer_fields: Mapping[str, str] = field(default_factory=dict)
    """Those that stand beside `vision_config`."""
    defaults: Mapping[str, Any]
    """What our fields are that a folder does not have."""
    ignored: tuple[str, ...] = ()
    """Fields of its `vision_config`, beside those of all, that say nothing about the tower."""
    ids: Mapping[str, int]
    """Tokens around pictures: fields of the model's config.json, and transformers' defaults."""
    sections: tuple[int, int, int] | None = None
    """The default of `mrope_section`, where the decoder turns by time, row and column."""


_DEEP, _FULL_ATTENTION = "deepstack_visual_indexes", "fullatt_block_indexes"
_QWEN_FIELDS = (
    *("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size"),
    *("spatial_merge_size", "temporal_patch_size", "in_channels"),
)
_QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_QWEN3_VL = TowerFamily(
    model_type="qwen3_vl_vision",
    deepstack=True,
    prefix="model.visual.",
    names={
        "patches": "patch_embed.proj",
        "positions": "pos_embed",
        "attention_norm": "norm1",
        "mlp_norm": "norm2",
        "qkv": "attn.qkv",
        "out": "attn.proj",
        "up": "mlp.linear_fc1",
        "down": "mlp.linear_fc2",
        "hidden": "linear_fc1",
        "project": "linear_fc2",
        "deep_mergers": "deepstack_merger_list",
    },
    fields={name: name for name in (*_QWEN_FIELDS, "num_position_embeddings", _DEEP)},
    defaults={
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        _DEEP: (),
    },
    ids=_QWEN_IDS,
    sections=(24, 20, 20),
)
_QWEN2_5_VL = TowerFamily(
    model_type="qwen2_5_vl_vision",
    norm="rms_norm",
    activation="silu",
    patch_bias=False,
    positions="none",
    has_windows=True,
    prefix="model.visual.",
    names={
        "patches": "patch_embed.proj",
        "attention_norm": "norm1",
        "mlp_norm": "norm2",
        "qkv": "attn.qkv",
        "out": "attn.proj",
        "up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": "mlp.down_proj",
        "norm": "ln_q",
        "hidden": "mlp.0",
        "project": "mlp.2",
    },
    fields={
        name: name for name in (*_QWEN_FIELDS, "tokens_per_second", "window_size", _FULL_ATTENTION)
    },
    defaults={
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "tokens_per_second": 4,
        "window_size": 112,
    },
    ignored=("in_chans", "spatial_patch_size"),
    ids=_QWEN_IDS,
    sections=(16, 24, 24),
)
_IDEFICS3 = TowerFamily(
    model_type="idefics3_vision",
    has_frames=False,
    positions="bucketed",
    has_rope=False,
    has_last_norm=True,
    merger="linear",
    prefix="model.vision_model.",
    names={
        "patches": "embeddings.patch_embedding",
        "positions": "embeddings.position_embedding",
        "blocks": "encoder.layers",
        "attention_norm": "layer_norm1",
        "mlp_norm": "layer_norm2",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": "self_attn.out_proj",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
        "last_norm": "post_layernorm",
    },
    elsewhere={"merger.project.weight": "model.connector.modality_projection.proj.weight"},
    fields={
        "depth": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_heads": "num_attention_heads",
        "in_channels": "num_channels",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "norm_eps": "layer_norm_eps",
    },
    outer_fields={"spatial_merge_size": "scale_factor"},
    defaults={
        "depth": 12,
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_heads": 16,
        "in_channels": 3,
        "image_size": 224,
        "patch_size": 32,
        "norm_eps": 1e-6,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
    },
    ignored=(
        *("attention_dropout", "max_image_size", "size", "tie_word_embeddings"),
        "use_base_siglip",
    ),
    ids={"image_token_id": 128257},
)
TOWERS: dict[str, TowerFamily] = {
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": replace(_QWEN3_VL, model_type="qwen3_vl_moe_vision"),
    "qwen2_5_vl": _QWEN2_5_VL,
    "idefics3": _IDEFICS3,
    "smolvlm": replace(_IDEFICS3, model_type="smolvlm_vision"),
}
"""By the `model_type` of the model."""

_IGNORED = {
    *("_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "id2label"),
    *("initializer_range", "is_encoder_decoder", "label2id", "model_type", "output_attentions"),
    *("output_hidden_states", "problem_type", "return_dict", "torch_dtype", "transformers_version"),
}
"""Fields of a `vision_config` that say nothing about the computation of a whole tower."""
_THETA = 10000.0
"""The base of every rope over rows and columns, where a folder has no other."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The shape of a `Tower`; fields are named as in Qwen's `vision_config`. `ValueError` for a
    shape that there is not."""

    family: str
    """A key of `TOWERS`."""
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    """The width of what it gives: the decoder's."""
    num_position_embeddings: int | None = None
    """A square: rows of the table of positions, where it is stretched."""
    image_size: int | None = None
    """Pixels of a side of the pictures for which the table was learned, where it is bucketed: a
    patch of them has a row."""
    patch_size: int
    spatial_merge_size: int
    """The side of the square of patches that make one token."""
    temporal_patch_size: int
    """Frames of a patch."""
    in_channels: int
    deepstack_visual_indexes: tuple[int, ...] = ()
    """The blocks after which a merger reads the residual stream, from 0."""
    window_size: int | None = None
    """Pixels of a side of a window of attention, where there are some."""
    fullatt_block_indexes: tuple[int, ...] = ()
    """The blocks without windows, from 0."""
    tokens_per_second: int | None = None
    """Of a film: kept for folders."""
    norm_eps: float = 1e-6
    rope_theta: float = _THETA

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "int" and (type(value) is not int or value < 1):
                raise ValueError(f"{one.name}={value!r}: must be an integer of at least 1")
        if self.hidden_size % self.num_heads or (self.tower.has_rope and self.head_dim % 4):
            raise ValueError(
                f"hidden_size={self.hidden_size}, num_heads={self.num_heads}: "
                + (
                    "a head must have a multiple of 4 numbers, pairs that turn by the row and "
                    "pairs that turn by the column"
                    if self.tower.has_rope
                    else "all heads must have equally many numbers"
                )
            )
        self._check_table()
        self._check_windows()
        layers = self.deepstack_visual_indexes
        if list(layers) != sorted(set(layers) & set(range(self.depth))):
            raise ValueError(
                f"deepstack_visual_indexes={layers}: must be ascending indices of the "
                f"{self.depth} blocks"
            )
        if layers and not self.tower.deepstack:
            raise ValueError(f"deepstack_visual_indexes={layers}: {self.family} has none")

    def _check_table(self) -> None:
        if self.tower.positions == "none":
            return
        if self.tower.positions == "bucketed":
            if type(self.image_size) is not int or self.image_size < self.patch_size:
                raise ValueError(
                    f"image_size={self.image_size!r}: must be an integer of at least patch_size="
                    f"{self.patch_size}"
                )
            return
        count = self.num_position_embeddings
        if type(count) is not int or count < 1 or math.isqrt(count) ** 2 != count:
            raise ValueError(f"num_position_embeddings={count!r}: must be a square")

    def _check_windows(self) -> None:
        blocks, unit = self.fullatt_block_indexes, self.spatial_merge_size * self.patch_size
        if not self.tower.has_windows:
            return
        if type(self.window_size) is not int or self.window_size < unit:
            raise ValueError(
                f"window_size={self.window_size!r}: must be an integer of at least {unit}, the "
                "pixels of a token"
            )
        if not set(blocks) <= set(range(self.depth)):
            raise ValueError(
                f"{_FULL_ATTENTION}={blocks}: must be indices of the {self.depth} blocks"
            )

    @property
    def window_tokens(self) -> int | None:
        """Tokens of a side of a window."""
        if self.window_size is None:
            return None
        return self.window_size // self.spatial_merge_size // self.patch_size

    @property
    def tower(self) -> TowerFamily:
        """The parts of its family."""
        return tower_family(self.family)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def table_side(self) -> int:
        """Rows, and columns, of the table of positions."""
        if self.image_size is not None:
            return self.image_size // self.patch_size
        return math.isqrt(self.num_position_embeddings or 0)

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """The shape of a patch's numbers: channels, frames where it has some, rows, columns."""
        frames = (self.temporal_patch_size,) if self.tower.has_frames else ()
        return (self.in_channels, *frames, self.patch_size, self.patch_size)

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return math.prod(self.patch_shape)

    @property
    def patches_per_token(self) -> int:
        return self.spatial_merge_size**2


def tower_family(name: str) -> TowerFamily:
    """`ValueError` for a family without a tower here, with those that have one."""
    if name not in TOWERS:
        raise ValueError(f"{name!r}: no such vision tower; there are {', '.join(TOWERS)}")
    return TOWERS[name]


def read_vision_config(family: str, found: Mapping[str, Any], **around: Any) -> VisionConfig:
    """The `vision_config` of a config.json of `family`, a key of `TOWERS`; `around` are fields that
    are said elsewhere in it. `ValueError` names a field that is missing or unknown, or a value that
    a tower here does not have."""
    tower = tower_family(family)
    if found.get("model_type", tower.model_type) not in (family, tower.model_type):
        raise ValueError(
            f"vision_config: model_type={found['model_type']!r}: must be {tower.model_type!r}"
        )
    activation = found.get("hidden_act", tower.activation)
    if activation != tower.activation:
        raise ValueError(
            f"vision_config: hidden_act={activation!r}: not supported; supported is "
            f"{tower.activation!r}"
        )
    known = set(tower.fields.values())
    ignored = {*_IGNORED, *tower.ignored, "hidden_act"} | (
        {"rope_parameters"} if tower.has_rope else set()
    )
    unknown = sorted(found.keys() - known - ignored)
    if unknown:
        raise ValueError(
            f"vision_config: {', '.join(unknown)}: not known here, and may change the numbers; "
            f"known are {', '.join(sorted(known))}"
        )
    values = dict(tower.defaults)
    for ours, theirs in tower.fields.items():
        value = found.get(theirs)
        if value is not None:
            values[ours] = tuple(value) if isinstance(value, list) else value
    missing = sorted(tower.fields[name] for name in tower.fields.keys() - values.keys())
    if missing:
        raise ValueError(f"vision_config: {', '.join(missing)}: missing; mend config.json")
    theta = _read_rope(found.get("rope_parameters") or {}) if tower.has_rope else _THETA
    try:
        return VisionConfig(family=family, rope_theta=theta, **{**values, **around})
    except ValueError as error:
        raise ValueError(f"vision_config: {error}") from None


def _read_rope(rope: Mapping[str, Any]) -> float:
    if rope.get("rope_type", "axial") != "axial":
        raise ValueError(
            f"vision_config: rope_type={rope['rope_type']!r}: not supported; supported is 'axial'"
        )
    unknown = sorted(rope.keys() - {"rope_type", "rope_theta"})
    if unknown:
        raise ValueError(
            f"vision_config: rope_parameters: {', '.join(unknown)}: not known here, and may "
            "change the numbers; known are rope_theta and rope_type"
        )
    return float(rope.get("rope_theta", _THETA))


def write_vision_config(config: VisionConfig) -> dict[str, Any]:
    """The `vision_config` from which `read_vision_config` and transformers make the same tower."""
    tower = config.tower
    written: dict[str, Any] = {"model_type": tower.model_type, "hidden_act": tower.activation}
    for ours, theirs in tower.fields.items():
        value = getattr(config, ours)
        written[theirs] = list(value) if isinstance(value, tuple) else value
    if tower.has_rope:
        written["rope_parameters"] = {"rope_type": "axial", "rope_theta": config.rope_theta}
    return written
