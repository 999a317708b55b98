"""The training service's adapter of every family: a client names no matrices, and each model calls
its own differently. What was trained is what is sampled, log-prob by log-prob."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("pydantic", reason="needs the extra `serve`")

from tiny_models import FAMILY_SHAPES, MOE_SHAPES, SHAPES, make_reference
from tiny_text import make_tokenizer

from nanoengine.adapters.lora_engine import LoraEngine
from nanoengine.formats.families import FAMILIES
from nanoengine.formats.hf import load_model
from nanoengine.formats.matrices import adaptable
from nanoinfer.config import InferConfig
from nanoinfer.params import SamplingParams
from nanorl.serving.training_service.base_model import TrainableBase, targets_of
from nanorl.serving.training_service.checkpoints import Record
from nanorl.serving.training_service.service_config import ServiceConfig
from nanorl.serving.training_service.service_messages import Datum, ForwardBackward
from nanorl.serving.training_service.service_requests import AdamParams

OF_FAMILY = {
    "llama": "llama-gqa-tied",
    "qwen2": "qwen2-tied",
    "qwen3": "qwen3-bias",
    "qwen3_moe": "qwen3-moe",
    "mistral": "mistral-window",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "phi3": "phi3",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "gpt_oss": "gpt-oss",
}
TEXT_FAMILIES = [name for name, family in FAMILIES.items() if family.vision is None]
DEFAULT = {"rank": 2, "seed": 0, "train_mlp": True, "train_attn": True, "train_unembed": True}
TOKENS = [5, 17, 99, 3, 140, 7, 23, 61]


def make_base(shape: str, folder: Path) -> TrainableBase:
    reference = make_reference(shape)
    reference.save_pretrained(folder)
    make_tokenizer().save(folder)
    infer = InferConfig(num_blocks=64, max_num_seqs=4, max_batch_tokens=64)
    return TrainableBase(ServiceConfig(model=folder, infer=infer))


def test_all_families_are_here() -> None:
    assert list(OF_FAMILY) == TEXT_FAMILIES
    known = {**SHAPES, **MOE_SHAPES, **FAMILY_SHAPES}
    classes = {family: known[shape][0].model_type for family, shape in OF_FAMILY.items()}
    assert all(family == kind for family, kind in classes.items())


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_the_default_adapter_trains_and_is_sampled_as_it_was_trained(
    family: str, tmp_path: Path
) -> None:
    base = make_base(OF_FAMILY[family], tmp_path / "model")
    trained = base.make(Record(base_model=base.name, lora=DEFAULT))
    assert isinstance(trained.engine, LoraEngine)
    every = adaptable(load_model(tmp_path / "model"))
    assert trained.engine.adapter.targets == list(every)
    inputs = {
        "target_tokens": np.array([*TOKENS[1:], 9]),
        "weights": np.ones(len(TOKENS), dtype=np.float32),
    }
    request = ForwardBackward(
        model_id="m", seq_id=0, data=[Datum(tokens=TOKENS, inputs=inputs)], loss_fn="cross_entropy"
    )
    before = {name: change.high_OR.clone() for name, change in changes(trained).items()}
    for _ in range(2):
        trained.forward_backward(request)
        trained.optim_step(AdamParams(learning_rate=0.05))
    moved = [
        name for name, change in changes(trained).items() if (change.high_OR != before[name]).any()
    ]
    assert moved == list(every)
    trained.forward_backward(dataclasses.replace(request, forward_only=True))
    expected = trained.engine.last_logps[0][1:].tolist()

    trained.export(tmp_path / "snapshot")
    sampler = base.make_sampler()
    sampler.update_weights(base.weights(tmp_path / "snapshot"), 1)
    asked = SamplingParams(max_tokens=1, prompt_logps=True, temperature=1.0)
    scored = sampler.generate([[*TOKENS, 9]], asked)[0].prompt_logps
    assert scored == expected
    plain = base.make_sampler().generate([[*TOKENS, 9]], asked)[0].prompt_logps
    assert max(abs(a - b) for a, b in zip(scored, plain, strict=True)) > 0.01


def changes(trained: object) -> dict:
    return trained.engine.adapter.changes()  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_each_half_alone_is_all_of_it_and_nothing_else(family: str, tmp_path: Path) -> None:
    make_reference(OF_FAMILY[family]).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    names = {name.split(".", 3)[3] for name in adaptable(model)}
    attention = targets_of(model, {**DEFAULT, "train_mlp": False})
    assert set(attention) == {name for name in names if name.startswith("self_attn.")}
    if FAMILIES[family].experts:
        with pytest.raises(ValueError, match=r"train_attn is off, .* mixture of experts"):
            targets_of(model, {**DEFAULT, "train_attn": False})
    else:
        mlp = targets_of(model, {**DEFAULT, "train_attn": False})
        assert set(mlp) | set(attention) == names and not set(mlp) & set(attention)
    with pytest.raises(ValueError, match="are both off"):
        targets_of(model, {**DEFAULT, "train_attn": False, "train_mlp": False})


def test_the_dense_layers_of_a_mixture_are_reached(tmp_path: Path) -> None:
    make_reference("qwen3-moe-mixed").save_pretrained(tmp_path)
    found = targets_of(load_model(tmp_path), {**DEFAULT, "train_attn": False})
    assert found == ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def test_a_snapshot_that_was_spoiled_is_not_sampled(tmp_path: Path) -> None:
    base = make_base("phi3", tmp_path / "model")
    trained = base.make(Record(base_model=base.name, lora=DEFAULT))
    trained.export(tmp_path / "snapshot")
    file = tmp_path / "snapshot" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.0.mlp.gate_up_proj.lora_A.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(
        ValueError, match=r"'model\.layers\.0\.mlp\.gate_up_proj\.weight' holds NaN"
    ):
        base.make_sampler().update_weights(base.weights(tmp_path / "snapshot"), 1)
