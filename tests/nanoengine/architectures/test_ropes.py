"""Ropes: what a config.json says of them is what transformers 5 computes, in all families; and the
context reaches as far as vLLM lets it, or one line at load says where it ends."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from nanoengine.formats.families import FAMILIES
from nanoengine.formats.hf import load_model
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.config import ModelConfig
from nanoengine.model.rope_tables import plain_frequencies

NUM_DRAWS = 240
TEXT_FAMILIES = [name for name, family in FAMILIES.items() if family.vision is None]
FIELDS = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def their_config(fields: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**json.loads(json.dumps(fields)))


def their_ropes(fields: dict[str, Any]) -> list[tuple[torch.Tensor, float]]:
    """Frequencies and magnitude of the family's own module; of two ropes, those of layers that see
    everything come first."""
    config = their_config(fields)
    name = type(config).__module__.replace("configuration", "modeling")
    module = importlib.import_module(name)
    (kind,) = (c for n, c in inspect.getmembers(module) if n.endswith("RotaryEmbedding"))
    rope = kind(config)
    if hasattr(rope, "inv_freq"):
        return [(rope.inv_freq, rope.attention_scaling)]
    layers = ("full_attention", "sliding_attention")
    return [
        (getattr(rope, f"{at}_inv_freq"), getattr(rope, f"{at}_attention_scaling")) for at in layers
    ]


def our_ropes(config: ModelConfig) -> list[tuple[torch.Tensor, float]]:
    dim, scaling = config.rotary_dim, config.rope_scaling
    if scaling is None:
        ropes = [(plain_frequencies(config.rope_theta, dim), 1.0)]
    else:
        ropes = [(scaling.frequencies(config.rope_theta, dim), scaling.magnitude)]
    if config.local_rope_theta is not None:
        ropes.append((plain_frequencies(config.local_rope_theta, dim), 1.0))
    return ropes


def draw_scaling(draw: random.Random, family: str, dim: int) -> dict[str, Any]:
    kinds = ["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
    if family == "phi3":
        kinds = ["default", "longrope", "yarn"]  # of which yarn is a longrope
    elif FAMILIES[family].local_theta is not None:
        kinds = kinds[:4]
    kind = draw.choice(kinds)
    rope: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        rope["factor"] = draw.choice([1.0, 2.0, 4.0, 8.5])
    if kind in ("yarn", "llama3", "longrope") and draw.random() < 0.7:
        rope["original_max_position_embeddings"] = draw.choice([32, 64, 100])
    if kind == "yarn":
        more = {"attention_factor": 1.3, "beta_fast": 8, "beta_slow": 2, "mscale": 0.7}
        rope |= {k: v for k, v in more.items() if draw.random() < 0.3}
        if "mscale" in rope:
            rope["mscale_all_dim"] = draw.choice([0.5, 1.2])
        if FAMILIES[family].local_theta is None and draw.random() < 0.3:
            rope["truncate"] = False
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice([3.0, 4.0])}
    if kind == "longrope" or family == "phi3":
        rope |= {"short_factor": [1.0 + i / 9 for i in range(dim // 2)]}
        rope |= {"long_factor": [2.0 + i for i in range(dim // 2)]}
        if draw.random() < 0.5:
            rope.pop("factor", None)
    if kind == "default":
        rope = {"rope_type": kind}
    if draw.random() < 0.3:
        rope["rope_theta"] = draw.choice([500.0, 1e6])
    return rope


def draw_fields(draw: random.Random, family: str) -> dict[str, Any]:
    """The rope in one spelling or in both, in every place that a field may be at."""
    fields: dict[str, Any] = {**FIELDS, **EXPERTS.get(family, {}), "model_type": family}
    part = draw.choice([0.5, 1.0]) if FAMILIES[family].partial_rope else 1.0
    dim = int(16 * part)
    if FAMILIES[family].local_theta is not None:
        kinds = ["sliding_attention", "full_attention"]
        fields |= {"layer_types": kinds, "sliding_window": 64}
    if FAMILIES[family].partial_rope:
        fields["partial_rotary_factor"] = part
    if draw.random() < 0.5:
        fields["rope_theta"] = draw.choice([10000.0, 3e5])
    if draw.random() < 0.7:
        new = draw_scaling(draw, family, dim)
        fields["rope_parameters"] = new
        if FAMILIES[family].local_theta is not None:
            local = {"rope_type": "default"} | ({"rope_theta": 77.0} if draw.random() < 0.5 else {})
            fields["rope_parameters"] = {"full_attention": new, "sliding_attention": local}
    if draw.random() < 0.7:
        fields["rope_scaling"] = draw_scaling(draw, family, dim)
        if FAMILIES[family].local_theta is None and draw.random() < 0.5:
            fields["rope_scaling"]["type"] = fields["rope_scaling"].pop("rope_type")
    if draw.random() < 0.3 or (family == "phi3" and draw.random() < 0.7):
        fields["original_max_position_embeddings"] = draw.choice([48, 128])
    if draw.random() < 0.5:  # Gemma 3's, which others do not read
        fields["rope_local_base_freq"] = 123.0
    return fields


def test_every_drawn_rope_is_that_of_transformers() -> None:
    draw, seen, num_compared = random.Random(0), set(), 0
    for number in range(NUM_DRAWS):
        family = TEXT_FAMILIES[number % len(TEXT_FAMILIES)]
        fields = draw_fields(draw, family)
        try:
            theirs = their_ropes(fields)
        except (KeyError, ValueError, ZeroDivisionError):  # they have no such rope
            continue
        ours = ModelConfig.from_hf_dict(fields)
        found = our_ropes(ours)
        assert len(found) == len(theirs)
        for (mine, length), (expected, magnitude) in zip(found, theirs, strict=True):
            assert torch.allclose(mine, expected, rtol=1e-6, atol=0), fields
            assert length == pytest.approx(magnitude, rel=1e-9), fields
        again = ModelConfig.from_hf_dict(ours.to_hf_dict())
        assert again == ours, fields
        num_compared += 1
        seen.add((type(ours.rope_scaling).__name__, "rope_scaling" in fields))
    assert len(seen) == 12, "every kind, in both spellings"
    assert num_compared >= 200


def test_a_rope_that_was_added_to_a_folder_is_taken() -> None:
    """Saved by transformers 5, which writes rope_parameters; then a recipe was followed."""
    recipe = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    saved = {**FIELDS, "model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1e6}
    saved["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    config = ModelConfig.from_hf_dict({**saved, "rope_scaling": recipe})
    plain = ModelConfig.from_hf_dict(saved)
    assert config.max_position_embeddings == 131072 and plain.max_position_embeddings == 32768
    assert config.rope_theta == 1e6 and plain.rope_scaling is None
    (found, length), (theirs, magnitude) = (
        *our_ropes(config), *their_ropes({**saved, "rope_scaling": recipe})
    )  # fmt: skip
    assert torch.equal(found, theirs) and length == magnitude > 1
    assert not torch.equal(found, plain_frequencies(1e6, 16))
    with pytest.raises(ValueError, match="rope_type='mrope': not supported"):
        ModelConfig.from_hf_dict({**saved, "rope_scaling": {"rope_type": "mrope"}})


def test_how_far_a_rope_reaches_is_what_vllm_derives() -> None:
    """`_get_and_verify_max_len`: the factor times the length before it."""
    cases: list[tuple[str, dict[str, Any], int]] = [
        (
            "qwen2",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            256,
        ),
        (
            "qwen2",
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
            512,
        ),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0}, 1024),
        ("llama", {"rope_type": "linear", "factor": 3.0}, 768),
        ("llama", {"rope_type": "dynamic", "factor": 3.0}, 256),
        ("gemma3_text", {"rope_type": "linear", "factor": 8.0}, 256),
    ]
    for family, scaling, longest in cases:
        fields = {**FIELDS, "model_type": family, "rope_scaling": scaling}
        config = ModelConfig.from_hf_dict(fields)
        assert config.max_position_embeddings == longest, scaling
        assert ModelConfig.from_hf_dict(config.to_hf_dict()) == config


@pytest.mark.parametrize("value", ["4.0", float("nan"), float("inf"), 0, -2.0, ["x"]])
@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings"])
def test_a_number_of_a_rope_that_is_none_is_one_error(name: str, value: object) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    fields = {**FIELDS, "model_type": "qwen2", "rope_scaling": {**yarn, name: value}}
    with pytest.raises(ValueError, match=f"rope_parameters: {name}=.* positive number"):
        ModelConfig.from_hf_dict(fields)


LONG = {
    **FIELDS,
    "model_type": "phi3",
    "original_max_position_embeddings": 32,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + i / 9 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
}


def write_folder(folder: Path, fields: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(their_config(fields), attn_implementation="eager")
    theirs.eval().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    return theirs


def largest_difference(folder: Path, theirs: torch.nn.Module, num_tokens: int) -> float:
    ids = torch.randint(0, 64, (num_tokens,), generator=torch.Generator().manual_seed(1))
    ours = load_model(folder)
    with torch.no_grad():
        hidden = ours(ids, packed_positions([num_tokens]), PackedContext.from_lengths([num_tokens]))
        return float((ours.logits(hidden) - theirs(ids[None]).logits[0]).abs().max())


def test_a_longrope_says_its_limit_at_load_or_has_none(tmp_path: Path) -> None:
    theirs = write_folder(tmp_path, LONG)
    message = "original_max_position_embeddings=32 is the longest context, not .*=256.*short_factor"
    with pytest.warns(UserWarning, match=message) as said:
        assert load_model(tmp_path).config.max_position_embeddings == 32
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert largest_difference(tmp_path, theirs, 32) < 1e-4
    # the way on that the line names: one list, which transformers reads the same at every length
    long = LONG["rope_scaling"]["long_factor"]
    theirs = write_folder(
        tmp_path, {**LONG, "rope_scaling": {**LONG["rope_scaling"], "short_factor": long}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_model(tmp_path).config.max_position_embeddings == 256
    for num_tokens in (8, 32, 33, 200):
        assert largest_difference(tmp_path, theirs, num_tokens) < 1e-4


def test_yarn_beyond_the_length_it_was_given_for_is_that_of_transformers(tmp_path: Path) -> None:
    fields = {**FIELDS, "model_type": "qwen2", "max_position_embeddings": 64}
    fields["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    theirs = write_folder(tmp_path, fields)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_model(tmp_path).config.max_position_embeddings == 256
    assert largest_difference(tmp_path, theirs, 250) < 1e-4


def test_a_dynamic_rope_says_its_limit_at_load(tmp_path: Path) -> None:
    fields = {**FIELDS, "model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    write_folder(tmp_path, fields)
    with pytest.warns(UserWarning, match="max_position_embeddings=256 is the longest context"):
        load_model(tmp_path)


OUR_NAMES = {
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "sliding_window": "sliding_window",
}


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_field_that_is_left_out_is_what_transformers_takes(family: str) -> None:
    whole = {**FIELDS, **EXPERTS.get(family, {}), "model_type": family, "num_attention_heads": 32}
    whole |= {"sliding_window": None} if FAMILIES[family].windows == "none" else {}
    for name, ours in OUR_NAMES.items():
        fields = {key: value for key, value in whole.items() if key != name}
        theirs = their_config(fields)
        expected = getattr(theirs, name, None)
        if name == "head_dim" and expected is None:
            expected = 64 // 32
        if name == "sliding_window" and FAMILIES[family].windows != "all":
            continue  # other fields decide it
        assert getattr(ModelConfig.from_hf_dict(fields), ours) == expected, name
    null = {**whole, "num_key_value_heads": None}
    with contextlib.suppress(StrictDataclassFieldValidationError):  # some have no null
        assert their_config(null).num_key_value_heads == 32
    assert ModelConfig.from_hf_dict(null).num_kv_heads == 32
