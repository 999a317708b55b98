"""Ropes and windows of 200 drawn config.json are those of transformers, layer by layer.

Held to `ROPE_INIT_FUNCTIONS` are the frequencies and the factor of what rotates, at the length that
a model begins with and at the longest it serves; to a run of transformers' own model, what each of
its layers is given: the mask, and cosines and sines.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from field_draws import NUM_DRAWS, TWO_ROPES, Fields, draw_fields
from torch import Tensor
from transformers import AutoConfig, AutoModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from nanoengine.model.config import ModelConfig
from nanoengine.model.rope_tables import plain_frequencies
from nanoengine.model.transformer import Transformer, layer_class

NUM_TOKENS = 12  # more than the widest window
GROUP = 20  # draws of a test
LAYER_TYPES = ("full_attention", "sliding_attention")


def limit_of(fields: Fields) -> int:
    """The longest context that is served. A longrope changes its frequencies behind the original
    length, and so ours ends there; YaRN and linear ropes reach as far as their factor says."""
    longest = fields["max_position_embeddings"]
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if not rope and fields["model_type"] == "gpt_oss":  # its class has one
        rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    kinds = {rope.get("rope_type"), rope.get("type")}
    if {"longrope", "su"} & kinds:
        return min(longest, rope["original_max_position_embeddings"])
    if "yarn" in kinds:
        original = rope.get("original_max_position_embeddings", longest)
        return max(longest, int(original * rope.get("factor", longest / original)))
    if "linear" in kinds and fields["model_type"] not in TWO_ROPES:
        return max(longest, int(longest * rope["factor"]))
    return longest


def their_rope(config: Any, length: int, layer_type: str | None) -> tuple[Tensor, float]:
    """Frequencies and factor for a text of that length."""
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = rope["rope_type"]
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, seq_len=length, layer_type=layer_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim), 1.0


def our_rope(config: ModelConfig, layer_type: str | None) -> tuple[Tensor, float]:
    """The same of ours, which no length changes."""
    if layer_type == "sliding_attention":
        assert config.local_rope_theta is not None
        return plain_frequencies(config.local_rope_theta, config.rotary_dim), 1.0
    if config.rope_scaling is None:
        return plain_frequencies(config.rope_theta, config.rotary_dim), 1.0
    frequencies = config.rope_scaling.frequencies(config.rope_theta, config.rotary_dim)
    return frequencies, config.rope_scaling.magnitude


def check_ropes(fields: Fields) -> None:
    """Also of the config.json that is written again, in both spellings."""
    ours = ModelConfig.from_hf_dict(fields)
    assert ours.max_position_embeddings == limit_of(fields)
    again = ours.to_hf_dict()
    assert ModelConfig.from_hf_dict(again) == ours
    if "rope_theta" in again and (ours.rope_scaling or fields["model_type"] != "gpt_oss"):
        old = {name: value for name, value in again.items() if name != "rope_parameters"}
        assert ModelConfig.from_hf_dict(old) == ours
    for rope in again["rope_parameters"], again["rope_parameters"].get("full_attention", {}):
        assert rope.keys() <= {*RopeParameters.__annotations__, *LAYER_TYPES}
    for written in (fields, again):
        check_rope(ours, AutoConfig.for_model(**written))


def check_rope(ours: ModelConfig, theirs: Any) -> None:
    for layer_type in LAYER_TYPES if ours.model_type in TWO_ROPES else (None,):
        frequencies, factor = our_rope(ours, layer_type)
        for length in (1, ours.max_position_embeddings):
            expected, their_factor = their_rope(theirs, length, layer_type)
            torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
            assert factor == pytest.approx(their_factor, rel=1e-12)


def their_window(config: Any, index: int) -> int | None:
    """What the mask of a longer run would show."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * (index + 1)
    has_window = kinds[index] == "sliding_attention"
    return getattr(config, "sliding_window", None) if has_window else None


def what_layers_are_given(fields: Fields) -> list[dict[str, Any]]:
    """Keyword arguments of attention in every layer of transformers' model, in one run of it."""
    config = AutoConfig.for_model(**fields, attn_implementation="eager")
    model, given = AutoModel.from_config(config), []
    for layer in model.layers:
        keep = lambda module, _, options: given.append(options | {"module": module})  # noqa: E731
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(NUM_TOKENS)[None] % 13, use_cache=False)
    return given


def check_layers(fields: Fields) -> None:
    given, config = what_layers_are_given(fields), ModelConfig.from_hf_dict(fields)
    ours = Transformer(config, device="meta")
    ropes = layer_class(config).rope_tables(config, torch.float32, "cpu")
    tables = [ropes[:2], ropes[-2:]]
    assert len(given) == len(ours.layers)
    steps = torch.arange(NUM_TOKENS)
    behind = steps[:, None] - steps
    for i, (layer, theirs) in enumerate(zip(ours.layers, given, strict=True)):
        assert layer.window == their_window(theirs["module"].config, i), f"layer {i}"
        seen = (behind >= 0) & (behind < (layer.window or NUM_TOKENS))
        assert torch.equal(seen, theirs["attention_mask"][0, 0] == 0), f"layer {i}: mask"
        assert bool(layer.rotary_dim) == bool(getattr(theirs["module"], "use_rope", True)), i
        half, all_pairs = config.rotary_dim // 2, config.head_dim // 2
        turned = [table[:NUM_TOKENS] for table in tables[layer.has_local_rope]]
        still = torch.tensor([1.0, 0.0])[:, None, None].expand(2, NUM_TOKENS, all_pairs - half)
        expected = [table[0, :, :half] for table in theirs["position_embeddings"]]
        expected = [torch.cat(pair, -1) for pair in zip(expected, still, strict=True)]
        torch.testing.assert_close(turned, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("first", range(0, NUM_DRAWS, GROUP))
def test_drawn_ropes_are_those_of_transformers(first: int) -> None:
    for seed in range(first, first + GROUP):
        fields = draw_fields(seed)
        try:
            check_ropes(fields)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {fields}") from error


@pytest.mark.parametrize("first", range(0, NUM_DRAWS, GROUP))
def test_every_layer_sees_and_turns_as_transformers_does(first: int) -> None:
    for seed in range(first, first + GROUP):
        fields = draw_fields(seed)
        try:
            check_layers(fields)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {fields}") from error
