"""The shape of a model: one frozen dataclass read from, and written to, a Hugging Face config.json.

Llama, Qwen2/2.5 and Qwen3 are one definition that differs in three switches: a bias in the q/k/v
projection, a bias in the output projection, and a norm on each query and key head. Qwen3-MoE is
Qwen3 with a mixture of experts in place of the MLP of all layers but `dense_layers`.
Everything the definition cannot express is refused with the field's name: running such a model
anyway would give plausible and wrong numbers. Left out: sliding windows, rope types other than
`default` and `llama3`, quantised weights.
Next: transformer.py (the computation), hf.py (the tensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""model_type -> the `transformers` class of the same model."""

MAX_LAYERS = 10_000
"""Ten times the deepest models that were ever trained: more is a damaged file."""

_NORM_EPS = 1e-6  # the default of all families in transformers
_ROPE_THETA = 10000.0  # likewise
_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768}  # likewise
_QWEN3_HEAD_DIM = 128  # likewise; the others derive it from the hidden size


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling: low frequencies divided by `factor`, a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a `Transformer`. Ids are token ids; `eos_ids` is a set of ends of turn."""

    model_type: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = _NORM_EPS
    rope_theta: float = _ROPE_THETA
    rope_scaling: Llama3Rope | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dense_layers: tuple[int, ...] = ()
    max_position_embeddings: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if self.model_type not in ARCHITECTURES:
            raise ValueError(
                f"model_type={self.model_type!r}: not supported; supported are "
                f"{', '.join(ARCHITECTURES)}"
            )
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        _check_depth(self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads}: must be a multiple of num_kv_heads="
                f"{self.num_kv_heads}, each key head serves an equal group of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, rope rotates pairs")
        _check_family(self)
        _check_experts(self)

    def is_moe_layer(self, index: int) -> bool:
        """Say whether layer `index` holds a mixture of experts."""
        return self.num_experts > 0 and index not in self.dense_layers

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` of a Hugging Face folder."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(
                f"{file} does not exist: give a Hugging Face model folder (config.json, "
                "*.safetensors, tokenizer.json)"
            )
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON ({error}): fetch it again") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{file} must hold a JSON object, not a {type(fields).__name__}")
        try:
            return cls.from_hf_dict(fields)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def from_hf_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Translate the fields of a config.json, refusing what this definition cannot express."""
        family = fields.get("model_type")
        if family not in ARCHITECTURES:
            raise ValueError(
                f"model_type={family!r}: not supported; supported are {', '.join(ARCHITECTURES)}"
            )
        _refuse_unsupported(fields)
        heads = _require(fields, "num_attention_heads")
        hidden = _require(fields, "hidden_size")
        head_dim = fields.get("head_dim")
        if head_dim is None:
            head_dim = _QWEN3_HEAD_DIM if family == "qwen3" else hidden // max(heads, 1)
        has_bias = bool(fields.get("attention_bias", False))
        theta, scaling = _read_rope(fields)
        return cls(
            model_type=family,
            vocab_size=_require(fields, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_require(fields, "intermediate_size"),
            num_layers=_require(fields, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rms_norm_eps=fields.get("rms_norm_eps", _NORM_EPS),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            attention_bias=family == "qwen2" or has_bias,
            attention_output_bias=family != "qwen2" and has_bias,
            qk_norm=family in _WITH_QK_NORM,
            **(_read_experts(fields) if family == "qwen3_moe" else {}),
            max_position_embeddings=fields.get("max_position_embeddings", _MAX_POSITIONS[family]),
            bos_id=fields.get("bos_token_id"),
            eos_ids=_read_ids(fields.get("eos_token_id")),
            pad_id=fields.get("pad_token_id"),
        )

    def to_hf_dict(self) -> dict[str, Any]:
        """The config.json from which `transformers` and `from_hf_dict` build the same model."""
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_scaling is not None:
            rope |= {"rope_type": "llama3", **vars(self.rope_scaling)}
        fields: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,  # read by transformers 4; 5 reads rope_parameters
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids),
            "pad_token_id": self.pad_id,
        }
        if not self.eos_ids:
            fields["eos_token_id"] = None
        if self.rope_scaling is not None:
            fields["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
        if self.model_type != "qwen2":
            fields["attention_bias"] = self.attention_bias
        if self.model_type == "llama":
            fields["mlp_bias"] = False
        if self.model_type == "qwen3_moe":
            fields |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_experts_per_token,
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "mlp_only_layers": list(self.dense_layers),
                "decoder_sparse_step": 1,
            }
        return fields


_WITH_QK_NORM = ("qwen3", "qwen3_moe")
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


def _check_depth(num_layers: int) -> None:
    """Refuse an absurd depth before anything is done layer by layer."""
    if num_layers > MAX_LAYERS:
        raise ValueError(
            f"num_hidden_layers={num_layers}: must be at most {MAX_LAYERS}; is config.json damaged?"
        )


def _check_family(config: ModelConfig) -> None:
    """The switches must be ones that the family's config.json can carry."""
    if config.qk_norm != (config.model_type in _WITH_QK_NORM):
        raise ValueError(
            f"qk_norm={config.qk_norm}: must be True for qwen3 and qwen3_moe and False for the "
            f"other families (this is {config.model_type}); use model_type='qwen3' for a model "
            "with query and key norms"
        )
    if config.model_type == "qwen2":
        if not config.attention_bias or config.attention_output_bias:
            raise ValueError(
                "attention_bias: qwen2 has it in q/k/v and not in the output; set "
                "attention_bias=True, attention_output_bias=False"
            )
    elif config.attention_bias != config.attention_output_bias:
        raise ValueError(
            f"attention_output_bias={config.attention_output_bias}: {config.model_type} has one "
            "switch for all four projections; set it equal to attention_bias"
        )


def _check_experts(config: ModelConfig) -> None:
    if config.model_type != "qwen3_moe":
        if config.num_experts:
            raise ValueError(
                f"num_experts={config.num_experts}: must be 0 for {config.model_type}; use "
                "model_type='qwen3_moe' for a mixture of experts"
            )
        return
    for name in ("num_experts", "moe_intermediate_size"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}: must be at least 1 for qwen3_moe")
    if not 1 <= config.num_experts_per_token <= config.num_experts:
        raise ValueError(
            f"num_experts_per_token={config.num_experts_per_token}: must be from 1 to num_experts="
            f"{config.num_experts}"
        )
    outside = [layer for layer in config.dense_layers if not 0 <= layer < config.num_layers]
    if outside:
        raise ValueError(f"dense_layers: {outside} are not among the {config.num_layers} layers")


def _read_experts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults are those of `Qwen3MoeConfig` in transformers."""
    step = fields.get("decoder_sparse_step", 1)
    if step < 1:
        raise ValueError(f"decoder_sparse_step={step}: must be at least 1")
    num_layers = _require(fields, "num_hidden_layers")
    _check_depth(num_layers)
    dense = {layer for layer in range(num_layers) if (layer + 1) % step}
    dense |= set(fields.get("mlp_only_layers") or ())
    if "num_experts" not in fields and "num_local_experts" in fields:
        fields = {**fields, "num_experts": fields["num_local_experts"]}
    return {
        "num_experts": _require(fields, "num_experts"),
        "num_experts_per_token": _require(fields, "num_experts_per_tok"),
        "moe_intermediate_size": _require(fields, "moe_intermediate_size"),
        "norm_topk_prob": bool(fields.get("norm_topk_prob", False)),
        "dense_layers": tuple(sorted(dense)),
    }


def _require(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: must be an integer")
    return value


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act={activation!r}: not supported; supported is 'silu'")
    if fields.get("mlp_bias"):
        raise ValueError("mlp_bias=true: not supported; supported is false")
    if fields.get("quantization_config"):
        raise ValueError(
            "quantization_config: quantised weights are not supported; use the fp32 or bf16 "
            "version of this model"
        )
    if fields.get("use_sliding_window") or (
        fields.get("sliding_window") and fields.get("use_sliding_window") is None
    ):
        raise ValueError("use_sliding_window=true: not supported; supported is full attention")
    kinds = set(fields.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"layer_types={sorted(kinds)}: not supported; supported is full_attention in all layers"
        )


def _read_rope(fields: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (4)."""
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", fields.get("rope_theta", _ROPE_THETA)))
    if float(rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ValueError("partial_rotary_factor: not supported; supported is 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r}: not supported; supported are 'default', 'llama3'")
    names = Llama3Rope.__dataclass_fields__
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"rope_parameters: rope_type 'llama3' needs {', '.join(missing)}")
    return theta, Llama3Rope(**{name: rope[name] for name in names})


def _read_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
