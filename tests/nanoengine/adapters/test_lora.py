"""Merged adapters equal adapters applied beside the weights of the transformers model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import FAMILY_SHAPES, make_reference, save_reference

from nanoengine.adapters.lora import merge_lora
from nanoengine.formats.hf import load_model
from nanoengine.formats.matrices import adaptable
from nanoengine.model.attention import PackedContext, packed_positions

SHAPE = "qwen2-untied-theta"
MODULES = {
    "model.layers.0.self_attn.q_proj": (48, 48),
    "model.layers.1.self_attn.v_proj": (16, 48),
    "model.layers.2.mlp.gate_proj": (80, 48),
    "model.layers.2.mlp.down_proj": (48, 80),
    "lm_head": (211, 48),
}
IDS = torch.tensor([5, 17, 99, 3, 140, 7])


def write_adapter(folder: Path, rank: int = 4, **options: object) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module, (out, width) in MODULES.items():
        for letter, shape in (("A", (rank, width)), ("B", (out, rank))):
            tensors[f"base_model.model.{module}.lora_{letter}.weight"] = (
                torch.randn(shape, generator=generator) * 0.2
            )
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | options))
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def adapted_logits(tensors: dict[str, torch.Tensor], scales: dict[str, float]) -> torch.Tensor:
    """The reference with B(A(x)) added to the output of each adapted layer."""
    reference = make_reference(SHAPE)
    for module in MODULES:
        low, high = (tensors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")

        def add(_, inputs, output, low=low, high=high, scale=scales[module]):
            return output + scale * (inputs[0] @ low.T @ high.T)

        reference.get_submodule(module).register_forward_hook(add)
    with torch.no_grad():
        return reference(IDS[None]).logits[0]


def our_logits(folder: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = load_model(folder, dtype)
    merge_lora(model, adapter)
    with torch.no_grad():
        hidden = model(IDS, packed_positions([len(IDS)]), PackedContext.from_lengths([len(IDS)]))
        return model.logits(hidden).float()


@pytest.mark.parametrize(
    ("options", "scale", "lm_head_scale"),
    [
        ({}, 6 / 4, 6 / 4),
        ({"use_rslora": True}, 6 / 2, 6 / 2),
        # of two patterns that match the first counts, as in peft
        ({"alpha_pattern": {"lm_head": 2, "lm_.*": 9, "layers.9.mlp": 50}}, 6 / 4, 2 / 4),
    ],
)
def test_a_merged_adapter_equals_one_beside_the_weights(
    tmp_path: Path, options: dict, scale: float, lm_head_scale: float
) -> None:
    save_reference(SHAPE, tmp_path)
    tensors = write_adapter(tmp_path, **options)
    scales = dict.fromkeys(MODULES, scale) | {"lm_head": lm_head_scale}
    expected = adapted_logits(tensors, scales)
    torch.testing.assert_close(our_logits(tmp_path, tmp_path), expected, rtol=1e-4, atol=1e-3)
    plain = make_reference(SHAPE)(IDS[None]).logits[0]
    assert (expected - plain).abs().max() > 1


def test_what_cannot_be_merged_is_refused_and_the_model_is_unchanged(tmp_path: Path) -> None:
    save_reference(SHAPE, tmp_path)
    model = load_model(tmp_path)
    before = model.layers[0].qkv.weight.clone()

    def refuse(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            merge_lora(model, tmp_path)
        assert torch.equal(model.layers[0].qkv.weight, before)

    refuse(r"adapter_config\.json does not exist")
    for options, message in (
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
    ):
        write_adapter(tmp_path, **options)
        refuse(message)
    tensors = write_adapter(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    last = "base_model.model.lm_head.lora_B.weight"
    without = {name: tensor for name, tensor in tensors.items() if name != last}
    for broken, message in (
        (tensors | {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": IDS}, "layers.7"),
        (tensors | {"base_model.model.model.embed_tokens.lora_embedding_A": IDS}, "embedding_A"),
        (without, "lora_A alone"),
        (without | {last: torch.zeros(3, 4)}, "another model"),
        (without | {last: torch.zeros(211, 5)}, "ranks 5 of B and 4 of A"),
    ):
        save_file(broken, file)
        refuse(message)
    file.write_bytes(b"no")
    refuse("no safetensors file")


@pytest.mark.parametrize("shape", FAMILY_SHAPES)
def test_adapters_can_be_of_every_matrix_that_transformers_has(shape: str, tmp_path: Path) -> None:
    reference = save_reference(shape, tmp_path)
    theirs = {
        name: module.weight
        for name, module in reference.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    ours = adaptable(load_model(tmp_path))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(place.weight, theirs[name]) for name, place in ours.items())
