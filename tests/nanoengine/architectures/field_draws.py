"""Draws config.json at random: every family, rope scaling, window rule and both spellings.

Every draw is one that transformers takes and that a `ModelConfig` is to equal; the models are as
small as can be. Left out is what transformers 5.23 does not read where each kind of layer has a
rope of its own: `truncate`, and the old name `type` of a scaling.
"""

from __future__ import annotations

import random
from typing import Any

from nanoengine.formats.families import FAMILIES

Fields = dict[str, Any]
NUM_DRAWS = 200
KINDS = ("default", "linear", "dynamic", "yarn", "yarn", "yarn", "longrope", "longrope", "llama3")
OWN_KINDS = {
    "phi3": ("default", "longrope"),  # transformers refuses others
    "gpt_oss": (*KINDS, *("default",) * 6),  # none at all means the one it was published with
}
THETAS = (20.0, 100.0, 1000.0, 10000.0, 500000.0)
ORIGINALS = (32, 64, 256, 1024, 4096)
BETAS: tuple[Fields, ...] = (
    *({}, {}, {"beta_fast": 1.0}),
    *({"beta_fast": 8.0, "beta_slow": 2.0}, {"beta_fast": 16.0, "beta_slow": 8.0}),
)
TEXT_FAMILIES = [name for name, family in FAMILIES.items() if family.vision is None]
TWO_ROPES = ("olmo3", "gemma3_text")
HALF_TURNED = ("phi3", "glm4")


def draw_fields(seed: int) -> Fields:
    """The same seed gives the same fields; the families come in turn."""
    dice = random.Random(seed)
    family = TEXT_FAMILIES[seed % len(TEXT_FAMILIES)]
    num_layers = dice.randint(1, 7)
    heads = dice.choice((1, 2))
    head_dim = dice.choice((8, 16, 32))
    fields: Fields = {
        "model_type": family,
        "vocab_size": 13,
        "hidden_size": heads * head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family != "phi3":  # whose heads share the width
        fields["head_dim"] = head_dim
    if FAMILIES[family].experts is not None:
        name = "num_experts" if family == "qwen3_moe" else "num_local_experts"
        fields |= {name: 2, "num_experts_per_tok": 1}
    if family == "qwen3_moe":
        fields["moe_intermediate_size"] = 8
    return fields | draw_rope(dice, family, head_dim) | draw_windows(dice, family, num_layers)


def draw_rope(dice: random.Random, family: str, head_dim: int) -> Fields:
    """Everything about positions, in the spelling of transformers 4 or 5."""
    part = dice.choice((0.5, 0.75, 1.0)) if family in HALF_TURNED else 1.0
    original = dice.choice(ORIGINALS)
    kind = dice.choice(OWN_KINDS.get(family, KINDS))
    scaling = draw_scaling(dice, kind, int(head_dim * part) // 2, original)
    if family in TWO_ROPES:
        scaling.pop("truncate", None)
    fields: Fields = {"max_position_embeddings": original * dice.choice((1, 1, 2, 4))}
    if family == "phi3":  # one field for all its scalings, beside them
        fields["original_max_position_embeddings"] = original
    rope: Fields = {"rope_theta": dice.choice(THETAS)} if dice.random() < 0.9 else {}
    if family in HALF_TURNED:
        rope["partial_rotary_factor"] = part
    if dice.random() < 0.5:
        fields |= rope
        if kind != "default":
            name = "rope_type" if family in TWO_ROPES else dice.choice(("type", "rope_type"))
            if family == "phi3" and dice.random() < 0.3:
                kind = "su"  # LongRoPE before it had that name
            fields["rope_scaling"] = {name: kind} | scaling
        if family in TWO_ROPES and dice.random() < 0.5:  # Gemma 3's, too
            fields["rope_local_base_freq"] = dice.choice(THETAS)
        return fields
    rope = {"rope_type": kind, **rope, **scaling}
    if family in TWO_ROPES:
        local = {"rope_type": "default", "rope_theta": dice.choice(THETAS)}
        return fields | {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return fields | {"rope_parameters": rope}


def draw_scaling(dice: random.Random, kind: str, num_pairs: int, original: int) -> Fields:
    """The fields of one scaling. Ramps of YaRN begin before the first pair, and end behind the
    last; where they are not rounded they may have no length."""
    if kind == "default":
        return {}
    factor = dice.choice((0.5, 1.0, 2.0, 4.0, 7.5, 40.0))
    if kind in ("linear", "dynamic"):
        return {"factor": factor}
    found: Fields = {"original_max_position_embeddings": original}
    if kind == "llama3":
        low, high = dice.choice(((1.0, 4.0), (1.0, 1.5), (0.25, 16.0)))
        return found | {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    own = {"attention_factor": dice.choice((0.5, 1.0, 1.3))} if dice.random() < 0.3 else {}
    if kind == "longrope":
        for name, most in (("short_factor", 2.0), ("long_factor", 30.0)):
            found[name] = [dice.uniform(1.0, most) for _ in range(num_pairs)]
        return found | own | dice.choice(({}, {"factor": factor}))
    found |= {"factor": factor} | own
    found |= dice.choice(({}, {}, {"truncate": False}, {"truncate": True}))
    found |= dice.choice(BETAS)
    for name in ("mscale", "mscale_all_dim"):
        if dice.random() < 0.7:
            found[name] = dice.choice((0, 0.5, 0.707, 1.0, 1.5))
    return found


def draw_windows(dice: random.Random, family: str, num_layers: int) -> Fields:
    """Which layers see how far."""
    rule, size = FAMILIES[family].windows, dice.randint(1, 9)
    listed = [dice.choice(("full_attention", "sliding_attention")) for _ in range(num_layers)]
    by_list: Fields = {"layer_types": listed} if dice.random() < 0.4 else {}
    if rule == "none":
        moe = {"sliding_window": size, "use_sliding_window": False}
        return moe if family == "qwen3_moe" and dice.random() < 0.5 else {}
    if rule == "all":
        return dice.choice(({"sliding_window": size}, {"sliding_window": None}, {}))
    has_size = family == "smollm3" or dice.random() < 0.85  # others have one of their own
    fields: Fields = {"sliding_window": size} if has_size else {}
    if rule == "pattern":
        if dice.random() < 0.5:  # Gemma 3's, which others do not read
            fields["sliding_window_pattern"] = dice.randint(2, 4)
        return fields | by_list
    if rule == "late":
        fields["max_window_layers"] = dice.randint(0, num_layers + 1)
    elif dice.random() < 0.5:
        fields["no_rope_layers"] = [dice.randint(0, 1) for _ in range(num_layers)]
    else:
        fields["no_rope_layer_interval"] = dice.randint(1, 4)
    if dice.random() < 0.3:
        return fields | {"use_sliding_window": False}
    return fields | {"use_sliding_window": True} | by_list
