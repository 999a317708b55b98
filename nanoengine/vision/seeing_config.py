"""The shape of a model that sees: its decoder's, its tower's, and how both meet.

The config.json of such a model nests: `text_config` is the decoder's, read and written by
formats/config_json.py as that of a text model; `vision_config` is the tower's (towers.py); the ids
of the tokens around pictures stand at the top. So does `tie_word_embeddings`, which alone counts:
`text_config` may say otherwise. A family that was published before there was a `text_config` has
the decoder's fields at the top, too, and is tied if either says so.

Left out: videos, but for the id of their placeholder, which is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.formats.config_json import read_shape, write_shape
from nanoengine.formats.families import family_of
from nanoengine.model.config import ModelConfig, RopeScaling
from nanoengine.vision.towers import (
    VisionConfig,
    read_vision_config,
    tower_family,
    write_vision_config,
)

_ROPES = {"rope_parameters", "rope_scaling"}
_OF_FOLDERS = ("quantization_config", "transformers_weights")
"""Fields about the tensors of a folder, which stand at the top."""
_AXES = {"mrope_interleaved", "mrope_section"}
"""Fields of a rope over rows and columns. The first is not read: the family decides."""
_ROPE_FIELDS = {"partial_rotary_factor", "rope_theta", "rope_type", "type"}


@dataclass(frozen=True, kw_only=True)
class SeeingConfig(ModelConfig):
    """The shape of a `SeeingTransformer`. `ValueError` for parts that do not fit each other."""

    vision: VisionConfig
    mrope_section: tuple[int, int, int] | None = None
    """Pairs of a head that turn by time, by row and by column; where each lies is the family's.
    None: all turn by the place in the sequence, among pictures, too."""
    image_token_id: int
    """The placeholder of a picture's tokens."""
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    """It stands before a picture's tokens, in families that have it."""
    vision_end_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sections, half = self.mrope_section, self.head_dim // 2
        if (sections is None) != (self.rope_axes == "none"):
            raise ValueError(f"mrope_section={sections}: {self.model_type} has another rope")
        if sections is not None and (
            len(sections) != 3 or min(sections) < 0 or sum(sections) != half
        ):
            raise ValueError(
                f"mrope_section={list(sections)}: must be three numbers of pairs whose sum is half "
                f"of head_dim, {half}"
            )
        if self.vision.out_hidden_size != self.hidden_size:
            raise ValueError(
                f"vision_config: out_hidden_size={self.vision.out_hidden_size}: must be the "
                f"decoder's hidden_size={self.hidden_size}"
            )
        num_deep = len(self.vision.deepstack_visual_indexes)
        if num_deep > self.num_layers:
            raise ValueError(
                f"vision_config: deepstack_visual_indexes: {num_deep} mergers feed as many first "
                f"layers, and the decoder has {self.num_layers}"
            )

    @property
    def rope_axes(self) -> str:
        """Say which pairs of a head turn by which of three positions (families.py)."""
        return family_of(self.model_type).rope_axes

    @property
    def is_dense(self) -> bool:
        """The decoder's layers are those of layers.py."""
        return not self.num_experts and not self.window_layers


def from_hf_dict(fields: Mapping[str, Any]) -> SeeingConfig:
    """Translate the fields of a config.json. `ValueError` as for a text model, and for fields of
    rope or tower that are not known."""
    family = family_of(fields.get("model_type"))
    assert family.vision is not None, "the caller looked"
    tower = tower_family(family.vision)
    is_flat = family.is_flat and fields.get("text_config") is None
    text = dict(fields) if is_flat else _part(fields, "text_config")
    if not is_flat and text.get("model_type", family.text_type) != family.text_type:
        raise ValueError(
            f"text_config: model_type={text['model_type']!r}: not supported in "
            f"{fields['model_type']}; supported is {family.text_type!r}"
        )
    has_axes = family.rope_axes != "none"
    ropes = {name: _without_axes(text[name]) for name in _ROPES if has_axes and text.get(name)}
    around_text = {name: fields[name] for name in _OF_FOLDERS if fields.get(name) is not None}
    shape = read_shape({**text, **ropes, **around_text, "model_type": fields["model_type"]}, family)
    ties = [fields.get("tie_word_embeddings"), family.is_flat and text.get("tie_word_embeddings")]
    shape["tie_word_embeddings"] = any(map(bool, ties))
    # of two, `rope_scaling` is what people add to a folder (formats/config_json.py)
    rope = {**(text.get("rope_parameters") or {}), **(text.get("rope_scaling") or {})}
    if has_axes:
        _check_rope(rope, shape["rope_scaling"])
        shape["mrope_section"] = tuple(rope.get("mrope_section") or tower.sections or ())
    around = {ours: fields.get(theirs) for ours, theirs in tower.outer_fields.items()}
    if "out_hidden_size" not in tower.fields:
        around["out_hidden_size"] = shape["hidden_size"]
    found = {name: value for name, value in around.items() if value is not None}
    return SeeingConfig(
        **shape,
        **{name: fields.get(name, default) for name, default in tower.ids.items()},
        vision=read_vision_config(family.vision, _part(fields, "vision_config"), **found),
    )


def to_hf_dict(config: SeeingConfig) -> dict[str, Any]:
    """The config.json from which `transformers` and `from_hf_dict` build the same model."""
    text = write_shape(config)
    architectures = text.pop("architectures")
    text["model_type"] = family_of(config.model_type).text_type
    if config.mrope_section is not None:
        axes: dict[str, Any] = {"mrope_section": list(config.mrope_section)}
        if config.rope_axes == "interleaved":
            axes["mrope_interleaved"] = True
        for name in _ROPES & text.keys():
            text[name] = {**text[name], **axes}
    tower = config.vision.tower
    return {
        "architectures": architectures,
        "model_type": config.model_type,
        "text_config": text,
        "vision_config": write_vision_config(config.vision),
        **{theirs: getattr(config.vision, ours) for ours, theirs in tower.outer_fields.items()},
        **{name: getattr(config, name) for name in tower.ids},
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _part(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{name}={found!r}: must be an object; fetch config.json again")
    return found


def _without_axes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rope's fields as those of a text model."""
    return {field: value for field, value in rope.items() if field not in _AXES}


def _check_rope(rope: Mapping[str, Any], scaling: RopeScaling | None) -> None:
    """`ValueError` for fields that nobody here reads."""
    known = _ROPE_FIELDS | _AXES | set(() if scaling is None else vars(scaling))
    unknown = sorted(rope.keys() - known)
    if unknown:
        raise ValueError(
            f"rope_parameters: {', '.join(unknown)}: not known here, and may change the numbers; "
            f"known are {', '.join(sorted(known))}"
        )
