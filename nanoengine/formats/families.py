"""What sets the model families apart: one record for each `model_type` of a config.json.

There is one definition of the model (model/transformer.py). A `ModelFamily` says which of its
switches are on, under which names Hugging Face keeps the tensors, and which fields its config.json
has, with the defaults of the configuration class in `transformers`. A family that needs no new
switch is one more entry in `FAMILIES`.
Left out: state that one model of a family has and another has not (config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kernels.moe.clamped_swiglu import SWIGLU_ALPHA, SWIGLU_LIMIT

_PRE_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}

Windows = Literal["none", "all", "late", "no_rope", "pattern"]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """The switches, tensor names and config.json fields of one `model_type`."""

    architecture: str
    """The class in `transformers`."""
    vision: str | None = None
    """The model sees, and its tower is this entry of `TOWERS` (vision/towers.py)."""
    text_type: str = ""
    """The `model_type` of the decoder in the config.json of a model that sees."""
    is_flat: bool = False
    """Published folders of a model that sees have the decoder's fields beside `vision_config`."""
    rope_axes: Literal["none", "interleaved", "sections"] = "none"
    """Among pictures the rope turns by time, row and column: the pairs of a head by turns, or some
    after the others."""

    # -- the computation
    norms: Mapping[str, str] = field(default_factory=lambda: _PRE_NORMS)
    """The norms of a layer: ours (`DecoderLayer`), and the name in Hugging Face's layer."""
    norm_offset: float = 0.0
    """What is added to the weight of a norm before it multiplies."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """A norm of queries and keys: none, of each head, or of all heads together."""
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """Of the gate in the MLP."""
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    """Which numbers of a head rotate together: i and i + half, or 2i and 2i + 1."""
    embeds_by_root: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    sinks: bool = False
    """Each query head has a learnt score that takes part in its softmax and has no value."""
    experts: Literal["separate", "stacked", "halves"] | None = None
    """The MLP is a mixture of experts: of SwiGLU and with tensors for each expert; or of a clamped
    SwiGLU, with biases in router and experts and with tensors [experts, in, out] that hold all of
    them, in which gate and up alternate; or of SwiGLU with tensors that hold all of them,
    [experts, in, out] or [experts, out, in], in which up follows gate."""

    # -- the tensors
    prefix: str = "model."
    """What the names of the decoder's tensors begin with in Hugging Face's folders, all but the
    head's. Here they begin with "model.". Where they do so there, too, a tower is no part of the
    model: its tensors' names are without "model."."""
    fused_qkv: bool = False
    """q, k and v are one tensor, `self_attn.qkv_proj`."""
    fused_gate_up: bool = False
    """gate and up are one tensor, `mlp.gate_up_proj`."""

    # -- config.json
    bias: Literal["none", "qkv", "qkv_switch", "switch"] = "switch"
    """Biases in attention: none, always in q/k/v, or by the field `attention_bias` in q/k/v or in
    all four projections."""
    windows: Windows = "none"
    """Which layers have a sliding window: all; those from `max_window_layers` on; those without
    rope; all but every n-th. But for `all`, a list `layer_types` decides where it is given, and
    for `late` and `no_rope` the field `use_sliding_window` turns them on."""
    window_period: int = 0
    """n of `pattern`: every n-th layer sees everything."""
    window_period_field: str = ""
    """The field that says another n, if the family has one."""
    local_theta: float | None = None
    """The default base of the rope of layers with a window, where they have one of their own."""
    local_theta_field: str = ""
    """The field beside `rope_parameters` that says another, if the family has one."""
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    """What a `rope_type` means in this family where that is another one."""
    copied: tuple[str, ...] = ()
    """Fields that have the same name in config.json and in `ModelConfig`."""
    partial_rope: bool = False
    """There is a `partial_rotary_factor`."""
    activation_field: str = "hidden_act"
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are always written, and refused where they have another value."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a field is that config.json does not have, where it is not in `DEFAULTS`."""

    def default(self, name: str) -> Any:
        """The value of a field that config.json does not have."""
        return self.defaults.get(name, DEFAULTS.get(name))


DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "partial_rotary_factor": 1.0,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
}
"""Those of most families."""

_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
_OLMO_NORMS = {
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}

_IDEFICS3 = ModelFamily(
    architecture="Idefics3ForConditionalGeneration",
    vision="idefics3",
    text_type="llama",
    prefix="model.text_model.",
    constants={"mlp_bias": False},
)

FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(architecture="LlamaForCausalLM", constants={"mlp_bias": False}),
    "qwen2": ModelFamily(
        architecture="Qwen2ForCausalLM", bias="qkv", windows="late", defaults=_QWEN
    ),
    "qwen3": ModelFamily(
        architecture="Qwen3ForCausalLM",
        qk_norm="head",
        windows="late",
        defaults={**_QWEN, "head_dim": 128},
    ),
    "qwen3_vl": ModelFamily(
        architecture="Qwen3VLForConditionalGeneration",
        vision="qwen3_vl",
        text_type="qwen3_vl_text",
        rope_axes="interleaved",
        prefix="model.language_model.",
        qk_norm="head",
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 128000,
            "num_key_value_heads": 32,
            "rope_theta": 500000.0,
        },
    ),
    "qwen3_vl_moe": ModelFamily(
        architecture="Qwen3VLMoeForConditionalGeneration",
        vision="qwen3_vl_moe",
        text_type="qwen3_vl_moe_text",
        rope_axes="interleaved",
        prefix="model.language_model.",
        qk_norm="head",
        experts="halves",
        defaults={
            "max_position_embeddings": 128000,
            "num_key_value_heads": 16,
            "rope_theta": 500000.0,
        },
    ),
    "qwen2_5_vl": ModelFamily(
        architecture="Qwen2_5_VLForConditionalGeneration",
        vision="qwen2_5_vl",
        text_type="qwen2_5_vl_text",
        is_flat=True,
        rope_axes="sections",
        bias="qkv",
        windows="late",
        rope_aliases={"mrope": "default"},
        defaults={
            "max_position_embeddings": 32768,
            "max_window_layers": 80,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": 4096,
        },
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": replace(_IDEFICS3, architecture="SmolVLMForConditionalGeneration", vision="smolvlm"),
    "qwen3_moe": ModelFamily(
        architecture="Qwen3MoeForCausalLM",
        qk_norm="head",
        experts="separate",
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4},
    ),
    "mistral": ModelFamily(
        architecture="MistralForCausalLM",
        bias="none",
        windows="all",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "smollm3": ModelFamily(
        architecture="SmolLM3ForCausalLM",
        windows="no_rope",
        constants={"mlp_bias": False},
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
    ),
    "granite": ModelFamily(
        architecture="GraniteForCausalLM",
        constants={"mlp_bias": False},
        copied=(
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        ),
        defaults={"attention_multiplier": 1.0},
    ),
    "olmo2": ModelFamily(
        architecture="Olmo2ForCausalLM",
        norms=_OLMO_NORMS,
        qk_norm="width",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "olmo3": ModelFamily(
        architecture="Olmo3ForCausalLM",
        norms=_OLMO_NORMS,
        qk_norm="width",
        windows="pattern",
        window_period=4,
        local_theta=500000.0,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    ),
    "phi3": ModelFamily(
        architecture="Phi3ForCausalLM",
        bias="none",
        windows="all",
        fused_qkv=True,
        fused_gate_up=True,
        partial_rope=True,
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    "gemma3_text": ModelFamily(
        architecture="Gemma3ForCausalLM",
        norms={
            "input_norm": "input_layernorm",
            "attention_norm": "post_attention_layernorm",
            "post_norm": "pre_feedforward_layernorm",
            "mlp_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
        qk_norm="head",
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
        embeds_by_root=True,
        windows="pattern",
        window_period=6,
        window_period_field="sliding_window_pattern",
        local_theta=10000.0,
        local_theta_field="rope_local_base_freq",
        copied=("query_pre_attn_scalar",),
        defaults={
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1000000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "glm4": ModelFamily(
        architecture="Glm4ForCausalLM",
        norms={
            "input_norm": "input_layernorm",
            "attention_norm": "post_self_attn_layernorm",
            "post_norm": "post_attention_layernorm",
            "mlp_norm": "post_mlp_layernorm",
        },
        rope_pairs="neighbours",
        bias="qkv_switch",
        fused_gate_up=True,
        partial_rope=True,
        defaults={
            "attention_bias": True,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
        },
    ),
    "gpt_oss": ModelFamily(
        architecture="GptOssForCausalLM",
        sinks=True,
        experts="stacked",
        windows="pattern",
        window_period=2,
        constants={"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT},
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "rope_theta": 150000.0,
            "sliding_window": 128,
        },
    ),
}
"""By `model_type`."""


def sees(model_type: object) -> bool:
    """Say whether models of that type have a vision tower."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return family is not None and family.vision is not None


def family_of(model_type: Any) -> ModelFamily:
    """`ValueError` for a family that is not supported, with those that are."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model_type!r}: not supported; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
