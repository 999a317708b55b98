"""Reads and writes a Hugging Face config.json, and says which shapes of a model there are.

`ModelConfig` (model/config.py) is the record; families.py has the table of what sets families
apart. Supported are the dense Llama, Mistral, Qwen2/2.5, Qwen3, SmolLM3, Granite, OLMo2, OLMo3,
Phi-3/4, Gemma 3 (text) and GLM-4, Qwen3-MoE, which is Qwen3 with a mixture of experts in place
of the MLP of all layers but `dense_layers`, and gpt-oss; and models that see, whose two parts
vision/seeing_config.py reads; the rope scalings are those of
architectures/rope.py. Everything the model cannot express is refused with the field's name:
running such a model anyway would give plausible and wrong numbers. Left out: softcapping, biases
in a dense MLP, quantised weights other than the MXFP4 of gpt-oss, which hf.py widens as it reads
them.
Next: families.py (what sets families apart), hf.py (the tensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from nanoengine.architectures.family_layer import attention_scale
from nanoengine.architectures.rope import (
    LinearRope,
    LongRope,
    lengthened,
    limit_of,
    read_scaling,
    write_scaling,
)
from nanoengine.formats.families import ModelFamily, family_of, sees
from nanoengine.model.config import ModelConfig

_SEEING_FROM = "nanoengine.vision.seeing_config:from_hf_dict"
_SEEING_TO = "nanoengine.vision.seeing_config:to_hf_dict"
ADAPTER_FILE = "adapter_config.json"
"""What makes a folder one of a LoRA adapter."""
MAX_LAYERS = 10_000
"""Ten times the deepest models that were ever trained: more is a damaged file."""


def from_folder(path: str | Path) -> ModelConfig:
    """Read `config.json` of a Hugging Face folder."""
    file = Path(path) / "config.json"
    if not file.is_file() and (Path(path) / ADAPTER_FILE).is_file():
        raise ValueError(
            f"{path} holds a LoRA adapter, not a model: give the folder of its base model, and "
            "this one as its adapter (`nanorl serve BASE --lora FOLDER`)"
        )
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
        return from_hf_dict(fields)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def from_hf_dict(fields: Mapping[str, Any]) -> ModelConfig:
    """Translate the fields of a config.json, refusing what this definition cannot express."""
    family = family_of(fields.get("model_type"))
    if family.vision is not None:
        seeing: ModelConfig = resolve_name(_SEEING_FROM)(fields)
        return seeing
    return ModelConfig(**read_shape(fields, family))


def read_shape(fields: Mapping[str, Any], family: ModelFamily) -> dict[str, Any]:
    """The arguments of `ModelConfig` that the fields of a text model, or of the decoder of one that
    sees, say."""
    _check_types(fields, family)
    _refuse_unsupported(fields, family)

    def get(name: str) -> Any:
        value = fields.get(name)
        return family.default(name) if value is None else value

    heads = _require(fields, "num_attention_heads")
    hidden = _require(fields, "hidden_size")
    num_layers = _require(fields, "num_hidden_layers")
    _check_depth(num_layers)
    head_dim = get("head_dim")
    if head_dim is None:
        head_dim = hidden // max(heads, 1)
    has_bias = family.bias == "qkv" or (family.bias != "none" and bool(get("attention_bias")))
    unroped = _read_unroped(fields, family, num_layers)
    longest = get("max_position_embeddings")
    rope = _read_rope(fields, family, longest)
    longest = lengthened(rope["rope_scaling"], longest, is_plain=family.local_theta is None)
    return dict(
        model_type=fields["model_type"],
        vocab_size=_require(fields, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_require(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_read_kv_heads(fields, family, heads),
        head_dim=head_dim,
        rms_norm_eps=get("rms_norm_eps"),
        **rope,
        unroped_layers=unroped,
        **_read_windows(fields, family, num_layers, unroped),
        tie_word_embeddings=bool(get("tie_word_embeddings")),
        attention_bias=has_bias,
        attention_output_bias=family.bias == "switch" and has_bias,
        qk_norm=family.qk_norm != "none",
        **_read_experts(fields, family),
        **{name: get(name) for name in family.copied if get(name) is not None},
        max_position_embeddings=longest,
        bos_id=fields.get("bos_token_id"),
        eos_ids=_read_ids(fields.get("eos_token_id")),
        pad_id=fields.get("pad_token_id"),
    )


def to_hf_dict(config: ModelConfig) -> dict[str, Any]:
    """The config.json from which `transformers` and `from_hf_dict` build the same model."""
    if sees(config.model_type):
        nested: dict[str, Any] = resolve_name(_SEEING_TO)(config)
        return nested
    return write_shape(config)


def write_shape(config: ModelConfig) -> dict[str, Any]:
    """The fields from which `read_shape` reads the same."""
    family = family_of(config.model_type)
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        family.activation_field: family.activation,
        "rms_norm_eps": config.rms_norm_eps,
        **_rope_fields(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids),
        "pad_token_id": config.pad_id,
        **_window_fields(config),
        **_multiplier_fields(config),
        **family.constants,
    }
    if not config.eos_ids:
        fields["eos_token_id"] = None
    if isinstance(config.rope_scaling, LongRope | LinearRope):
        fields["max_position_embeddings"] = config.rope_scaling.max_position_embeddings
    if isinstance(config.rope_scaling, LongRope):
        original = "original_max_position_embeddings"
        fields[original] = getattr(config.rope_scaling, original)
    if family.bias in ("switch", "qkv_switch"):
        fields["attention_bias"] = config.attention_bias
    if family.experts == "stacked":
        if config.dense_layers:
            raise ValueError(
                f"dense_layers={config.dense_layers}: must be (), the config.json of "
                f"{config.model_type} cannot say so"
            )
        fields |= {
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_token,
        }
    elif family.experts:
        fields |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_token,
            "moe_intermediate_size": config.moe_intermediate_size,
            "norm_topk_prob": config.norm_topk_prob,
            "mlp_only_layers": list(config.dense_layers),
            "decoder_sparse_step": 1,
        }
    return fields


def context_limit(config: ModelConfig) -> str | None:
    """One line where the context ends before the one that config.json speaks of."""
    return limit_of(config.rope_scaling, config.max_position_embeddings)


def check_config(config: ModelConfig) -> None:
    """`ValueError` for a shape that no model of its `model_type` has."""
    family_of(config.model_type)
    for name in _COUNTS:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}: must be at least 1")
    _check_depth(config.num_layers)
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads}: must be a multiple of num_kv_heads="
            f"{config.num_kv_heads}, each key head serves an equal group of query heads"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim}: must be even, rope rotates pairs")
    _check_family(config)
    _check_layers(config)
    _check_experts(config)


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
_SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "use_sliding_window",
    "use_bidirectional_attention",
    "is_causal",
)
_NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")
_INTEGERS = ("head_dim", "max_position_embeddings", "bos_token_id", "pad_token_id")
_MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "logits_scaling",
)


def _check_depth(num_layers: int) -> None:
    """Refuse an absurd depth before anything is done layer by layer."""
    if num_layers > MAX_LAYERS:
        raise ValueError(
            f"num_hidden_layers={num_layers}: must be at most {MAX_LAYERS}; is config.json damaged?"
        )


def _check_family(config: ModelConfig) -> None:
    """The switches must be ones that the family's config.json can carry."""
    family, name = family_of(config.model_type), config.model_type
    if config.qk_norm != (family.qk_norm != "none"):
        raise ValueError(
            f"qk_norm={config.qk_norm}: must be {not config.qk_norm} for {name}; use "
            "model_type='qwen3' for a model with a norm of each query and key head"
        )
    if family.bias == "qkv" and not config.attention_bias:
        raise ValueError(
            f"attention_bias: {name} has it in q/k/v and not in the output; set "
            "attention_bias=True, attention_output_bias=False"
        )
    if family.bias == "none" and config.attention_bias:
        raise ValueError(f"attention_bias=True: {name} has no biases; set it to False")
    if config.attention_output_bias != (family.bias == "switch" and config.attention_bias):
        raise ValueError(
            f"attention_output_bias={config.attention_output_bias}: {name} has one "
            "switch for all four projections; set it equal to attention_bias"
            if family.bias == "switch"
            else f"attention_output_bias=True: {name} has none there; set it to False"
        )
    if config.partial_rotary_factor != 1.0 and not family.partial_rope:
        raise ValueError(
            f"partial_rotary_factor={config.partial_rotary_factor}: not supported for {name}; "
            "supported is 1.0"
        )
    if (config.local_rope_theta is None) != (family.local_theta is None):
        raise ValueError(
            f"local_rope_theta={config.local_rope_theta}: {name} has "
            + (
                "no such rope; leave it None"
                if family.local_theta is None
                else f"one for layers with a window; its default is {family.local_theta}"
            )
        )
    for field in _MULTIPLIERS:
        value, plain = getattr(config, field), ModelConfig.__dataclass_fields__[field].default
        if value != plain and field not in family.copied:
            raise ValueError(f"{field}={value}: {name} has none; leave it {plain}")


def _check_layers(config: ModelConfig) -> None:
    """Lists of layers, and what they need."""
    family, name, every = family_of(config.model_type), config.model_type, range(config.num_layers)
    if family.windows != "no_rope" and config.unroped_layers:
        raise ValueError(f"unroped_layers: {name} has a rope in every layer; leave it empty")
    if config.window_layers and (config.sliding_window is None or config.sliding_window < 1):
        raise ValueError(
            f"sliding_window={config.sliding_window}: must be at least 1 where layers have one"
        )
    can_have = family.windows != "none"
    if family.windows == "all":
        can_have = config.window_layers == tuple(every)
    if config.window_layers and not can_have:
        raise ValueError(
            f"window_layers={config.window_layers}: not supported for {name}; supported is "
            f"{'all layers' if family.windows == 'all' else 'full attention'}"
        )
    for field in ("unroped_layers", "window_layers", "dense_layers"):
        outside = [layer for layer in getattr(config, field) if layer not in every]
        if outside:
            raise ValueError(f"{field}: {outside} are not among the {config.num_layers} layers")
    if config.rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor={config.partial_rotary_factor}: rotates {config.rotary_dim} "
            "numbers of each head; must be even, rope rotates pairs"
        )


def _check_experts(config: ModelConfig) -> None:
    name = config.model_type
    if not family_of(config.model_type).experts:
        if config.num_experts:
            raise ValueError(
                f"num_experts={config.num_experts}: must be 0 for {name}; use "
                "model_type='qwen3_moe' for a mixture of experts"
            )
        return
    for field in ("num_experts", "moe_intermediate_size"):
        if getattr(config, field) < 1:
            raise ValueError(f"{field}={getattr(config, field)}: must be at least 1 for {name}")
    kind = family_of(config.model_type).experts
    fixed: dict[str, Any] = {} if kind == "separate" else {"norm_topk_prob": True}
    if kind == "stacked":
        fixed["moe_intermediate_size"] = config.intermediate_size
    for field, value in fixed.items():
        if getattr(config, field) != value:
            raise ValueError(f"{field}={getattr(config, field)}: must be {value} for {name}")
    width = config.moe_intermediate_size
    if kind == "halves" and config.hidden_size in (width, 2 * width):
        # published folders have [experts, in, out], transformers 5 writes [experts, out, in]
        raise ValueError(
            f"moe_intermediate_size={width}, hidden_size={config.hidden_size}: an expert's matrix "
            f"would be square, and only its shape tells in which of two ways a folder of {name} "
            "stores it; take another width"
        )
    if not 1 <= config.num_experts_per_token <= config.num_experts:
        raise ValueError(
            f"num_experts_per_token={config.num_experts_per_token}: must be from 1 to num_experts="
            f"{config.num_experts}"
        )


def _read_experts(fields: Mapping[str, Any], family: ModelFamily) -> dict[str, Any]:
    """The defaults are those of `Qwen3MoeConfig` in transformers."""
    if family.experts is None:
        return {}
    if family.experts == "stacked":
        return {
            "num_experts": _require(fields, "num_local_experts"),
            "num_experts_per_token": _require(fields, "num_experts_per_tok"),
            "moe_intermediate_size": _require(fields, "intermediate_size"),
            "norm_topk_prob": True,
        }
    step = fields.get("decoder_sparse_step", 1)
    if step < 1:
        raise ValueError(f"decoder_sparse_step={step}: must be at least 1")
    num_layers = _require(fields, "num_hidden_layers")
    dense = {layer for layer in range(num_layers) if (layer + 1) % step}
    dense |= set(fields.get("mlp_only_layers") or ())
    if "num_experts" not in fields and "num_local_experts" in fields:
        fields = {**fields, "num_experts": fields["num_local_experts"]}
    return {
        "num_experts": _require(fields, "num_experts"),
        "num_experts_per_token": _require(fields, "num_experts_per_tok"),
        "moe_intermediate_size": _require(fields, "moe_intermediate_size"),
        # experts that share tensors: transformers divides by the sum whatever the field says
        "norm_topk_prob": family.experts == "halves" or bool(fields.get("norm_topk_prob", False)),
        "dense_layers": tuple(sorted(dense)),
    }


def _require(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: must be an integer")
    return value


def _read_kv_heads(fields: Mapping[str, Any], family: ModelFamily, heads: int) -> int:
    """Left out it is what the family's class in transformers says; null is one for each head."""
    name = "num_key_value_heads"
    value = fields.get(name, family.default(name))
    return heads if value is None else _require({name: value}, name)


def _count(fields: Mapping[str, Any], name: str, default: Any, *, least: int = 1) -> int:
    """A field that is a number of tokens or of layers."""
    value = _require({name: default} if fields.get(name) is None else fields, name)
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}")
    return value


def _check_types(fields: Mapping[str, Any], family: ModelFamily) -> None:
    """Refuse what Python would take for something else: "false" is true. As transformers does,
    whose classes say the types of all fields; null stands for the default."""

    def is_number(value: Any) -> bool:
        return type(value) in (int, float) and math.isfinite(value)

    def are_ids(value: Any) -> bool:
        return all(type(x) is int for x in (value if isinstance(value, list) else [value]))

    for names, is_right, rule in (
        (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
        ((*_NUMBERS, *family.copied), is_number, "a number"),
        (_INTEGERS, lambda value: type(value) is int, "an integer"),
        (("eos_token_id",), are_ids, "an integer, or a list of them"),
    ):
        for name in names:
            value = fields.get(name)
            if value is not None and not is_right(value):
                raise ValueError(f"{name}={value!r}: must be {rule}; mend config.json")


def _refuse_unsupported(fields: Mapping[str, Any], family: ModelFamily) -> None:
    activation = fields.get(family.activation_field, family.activation)
    if activation != family.activation:
        raise ValueError(
            f"{family.activation_field}={activation!r}: not supported; supported is "
            f"{family.activation!r}"
        )
    for name in ("mlp_bias", "use_bidirectional_attention"):
        if fields.get(name):
            raise ValueError(f"{name}=true: not supported; supported is false")
    if not fields.get("is_causal", True):  # of a model of embeddings, whose tokens see all others
        raise ValueError("is_causal=false: not supported; supported is true")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "per_layer_config"):
        if fields.get(name) is not None:
            raise ValueError(f"{name}={fields[name]}: not supported; supported is null")
    for name, value in family.constants.items():
        if fields.get(name) not in (None, value):
            raise ValueError(f"{name}={fields[name]}: not supported; supported is {value}")
    weights = fields.get("transformers_weights")
    if weights not in (None, "model.safetensors", "model.safetensors.index.json"):
        raise ValueError(
            f"transformers_weights={weights!r}: not supported; rename that file to "
            "model.safetensors and remove the field"
        )
    quantization = fields.get("quantization_config")
    is_mxfp4 = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    if quantization and not (is_mxfp4 and family.experts == "stacked"):
        raise ValueError(
            "quantization_config: quantised weights are not supported; use the fp32 or bf16 "
            "version of this model"
        )


def _read_unroped(
    fields: Mapping[str, Any], family: ModelFamily, num_layers: int
) -> tuple[int, ...]:
    """The layers without a rope: where `no_rope_layers` has a 0, or every n-th."""
    if family.windows != "no_rope":
        return ()
    flags = fields.get("no_rope_layers")
    if flags is None:
        period = _count(fields, "no_rope_layer_interval", family.default("no_rope_layer_interval"))
        return tuple(layer for layer in range(num_layers) if (layer + 1) % period == 0)
    if len(flags) < num_layers:
        raise ValueError(f"no_rope_layers: has {len(flags)} flags for {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not flags[layer])


def _read_windows(
    fields: Mapping[str, Any], family: ModelFamily, num_layers: int, unroped: tuple[int, ...]
) -> dict[str, Any]:
    """`sliding_window` and `window_layers`: which layers have windows is `ModelFamily.windows`."""
    rule, every = family.windows, range(num_layers)
    kinds = fields.get("layer_types")
    if kinds is not None and not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types={sorted(set(kinds))}: not supported; supported are full_attention and "
            "sliding_attention"
        )
    sliding = kinds is not None and "sliding_attention" in kinds
    size = fields.get("sliding_window", family.default("sliding_window"))
    has_switch = rule in ("late", "no_rope")
    if rule == "none":
        if fields.get("use_sliding_window") or (size and "use_sliding_window" not in fields):
            raise ValueError(
                "use_sliding_window=true: not supported for this family; supported is full "
                "attention"
            )
        if sliding:
            raise ValueError(
                "layer_types: sliding_attention is not supported for this family; supported is "
                "full_attention in all layers"
            )
        return {}
    if size is None or (has_switch and not fields.get("use_sliding_window")):
        if sliding:
            raise ValueError(
                f"layer_types: has sliding_attention, but sliding_window={size} and "
                f"use_sliding_window={fields.get('use_sliding_window')}; give all three"
            )
        if rule == "pattern" and kinds is None:
            raise ValueError(
                "sliding_window=null: this family has windows in most layers; give their length, "
                "or layer_types that are all full_attention"
            )
        return {}
    size = _count(fields, "sliding_window", family.default("sliding_window"))
    layers: list[int]
    if rule == "all":
        layers = list(every)
        if kinds is not None and set(kinds) != {"sliding_attention"}:
            raise ValueError(
                f"layer_types={sorted(set(kinds))}: not supported for this family; supported is "
                "sliding_attention in all layers"
            )
    elif kinds is not None:
        if len(kinds) < num_layers:
            raise ValueError(f"layer_types: has {len(kinds)} kinds for {num_layers} layers")
        layers = [layer for layer in every if kinds[layer] == "sliding_attention"]
    elif rule == "late":
        first = _count(fields, "max_window_layers", family.default("max_window_layers"), least=0)
        layers = [layer for layer in every if layer >= first]
    elif rule == "no_rope":
        layers = list(unroped)
    else:
        period = _count(fields, family.window_period_field, family.window_period)
        layers = [layer for layer in every if (layer + 1) % period]
    return {"sliding_window": size, "window_layers": tuple(layers)}


def _multiplier_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields that `ModelFamily.copied` names; None is the value that it stands for."""
    plain = {
        "attention_multiplier": attention_scale(config),
        "query_pre_attn_scalar": config.head_dim,
    }
    values = {name: getattr(config, name) for name in family_of(config.model_type).copied}
    return {name: plain[name] if value is None else value for name, value in values.items()}


def _window_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields from which `_read_unroped` and `_read_windows` read the same layers."""
    rule, every = family_of(config.model_type).windows, range(config.num_layers)
    if rule == "none":
        return {}
    fields: dict[str, Any] = {"sliding_window": config.sliding_window}
    if rule in ("late", "no_rope"):
        fields["use_sliding_window"] = config.sliding_window is not None
    if rule != "all":
        kinds = ("full_attention", "sliding_attention")
        fields["layer_types"] = [kinds[layer in config.window_layers] for layer in every]
    if rule == "no_rope":
        fields["no_rope_layers"] = [int(layer not in config.unroped_layers) for layer in every]
    return fields


def _read_rope(fields: Mapping[str, Any], family: ModelFamily, longest: int) -> dict[str, Any]:
    """The fields of `ModelConfig` that are about the rope. Both spellings: `rope_parameters`
    (transformers 5), one or one for each kind of layer, and `rope_theta` + `rope_scaling` (4). Of
    two, `rope_scaling` is taken, as transformers 5 does: it is what people add to a folder."""
    new, old = fields.get("rope_parameters") or {}, dict(fields.get("rope_scaling") or {})
    if "type" in old:  # its name before it was `rope_type`
        old.setdefault("rope_type", old.pop("type"))
    if fields.get("rope_parameters") is None and not old:
        new = family.default("rope_parameters") or {}
    found: dict[str, Any] = {}
    top = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    if family.local_theta is None:
        kinds = [kind for kind, value in new.items() if isinstance(value, dict)]
        if kinds:
            raise ValueError(
                f"rope_parameters: {', '.join(kinds)}: this family has one rope for all layers; "
                "give its fields without a kind of layer"
            )
        rope = {**top, **(old or new)}
        original = "original_max_position_embeddings"  # beside them it is what counts
        beside = fields.get(original, family.default(original))
        rope[original] = rope.get(original) if beside is None else beside
    else:
        local = new.get("sliding_attention") or {}
        if read_scaling(local) is not None:
            raise ValueError(
                f"rope_parameters: sliding_attention has rope_type={local['rope_type']!r}: not "
                "supported; supported is 'default'"
            )
        base = fields.get(family.local_theta_field, family.local_theta)
        found["local_rope_theta"] = float(local.get("rope_theta", base))
        rope = {**top, **(new.get("full_attention") or {}), **old}
    rope = {name: value for name, value in rope.items() if value is not None}
    if "mrope_section" in rope:
        raise ValueError(
            "rope_parameters: mrope_section: a rope over rows and columns of pictures, which this "
            "family does not have; mend config.json"
        )
    kind = str(rope.get("rope_type", rope.get("type")))
    if kind in family.rope_aliases:
        rope["rope_type"] = family.rope_aliases[kind]
    part = rope.get("partial_rotary_factor", family.default("partial_rotary_factor"))
    if part != 1.0 and not family.partial_rope:
        raise ValueError(
            f"partial_rotary_factor={part}: not supported for this family; supported is 1.0"
        )
    return found | {
        "rope_theta": float(rope.get("rope_theta", family.default("rope_theta"))),
        "rope_scaling": read_scaling({**rope, "max_position_embeddings": longest}),
        "partial_rotary_factor": float(part),
    }


def _rope_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields from which `_read_rope` reads the same rope."""
    family, scaling = family_of(config.model_type), write_scaling(config.rope_scaling)
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, **scaling}
    if family.partial_rope:
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    if family.local_theta is not None:
        local = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    fields: dict[str, Any] = {"rope_theta": config.rope_theta}  # read by transformers 4
    if family.partial_rope:
        fields["partial_rotary_factor"] = config.partial_rotary_factor
    fields["rope_parameters"] = rope
    if config.rope_scaling is not None:
        fields["rope_scaling"] = scaling
    return fields


def _read_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
