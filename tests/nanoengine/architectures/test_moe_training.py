"""Qwen3-MoE in training: gradients by any split, the same bits in rollout and trainer after a
step, and configurations it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_reference

from nanoengine.config import EngineConfig
from nanoengine.formats.hf import export_state, load_model, load_state
from nanoengine.model.config import ModelConfig
from nanoengine.packing import Sample
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoengine.state.whole_engine import Engine


def make_samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in (3, 17, 40, 9, 25):
        tokens = torch.randint(0, 211, (length,), generator=generator).tolist()
        samples.append(Sample(tokens=tokens, loss_mask=[0] + [1] * (length - 1), fields={}))
    return samples


def trained(folder: Path, dtype: str, budget: int, steps: int = 1, **options: Any) -> Engine:
    model = load_model(folder, torch.float64 if dtype == "fp64" else torch.float32)
    config = EngineConfig(dtype=dtype, micro_batch_tokens=budget, lr=1e-2, **options)  # type: ignore[arg-type]
    engine = Engine(model, config)
    for _ in range(steps):
        engine.train_step(make_samples(), sft_loss, num_loss_tokens)
    return engine


@pytest.mark.parametrize("shape", ["qwen3-moe", "qwen3-moe-mixed"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-5)])
def test_the_gradient_does_not_depend_on_the_micro_batches(
    shape: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    save_reference(shape, tmp_path)
    whole, split = (trained(tmp_path, dtype, n, max_grad_norm=0.0) for n in (1000, 1))
    for (name, a), b in zip(whole.model.named_parameters(), split.model.parameters(), strict=True):
        assert (a.main_grad - b.main_grad).norm() <= tolerance * a.main_grad.norm(), name
        assert a.main_grad.any(), name


def test_training_lowers_the_loss_and_checkpointing_gives_the_same_bits(tmp_path: Path) -> None:
    save_reference("qwen3-moe", tmp_path)
    plain = trained(tmp_path, "fp32", 60, steps=8)
    again = trained(tmp_path, "fp32", 60, steps=8, activation_checkpointing=True)
    for (name, a), b in zip(plain.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    before = trained(tmp_path, "fp32", 60, steps=0).train_step(
        make_samples(), sft_loss, num_loss_tokens
    )
    after = plain.train_step(make_samples(), sft_loss, num_loss_tokens)
    assert after["loss"] < before["loss"] - 1


def test_a_missing_expert_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    save_reference("qwen3-moe", tmp_path)
    model = load_model(tmp_path)
    state = {name: tensor * 2 for name, tensor in export_state(model)}
    missing = "model.layers.1.mlp.experts.4.up_proj.weight"
    del state[missing]
    before = model.embedding.detach().clone()
    with pytest.raises(ValueError, match=missing):
        load_state(model, state.items())
    assert torch.equal(model.embedding, before)


FIELDS = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_sparse_steps_and_named_layers_are_dense() -> None:
    assert ModelConfig.from_hf_dict(FIELDS).dense_layers == ()
    step = ModelConfig.from_hf_dict({**FIELDS, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert step.dense_layers == (0, 2, 3)
    assert [step.is_moe_layer(i) for i in range(4)] == [False, True, False, False]
    assert ModelConfig.from_hf_dict(step.to_hf_dict()) == step


@pytest.mark.parametrize(
    "change, name",
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_token=9"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"mlp_only_layers": [4]}, "dense_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ],
)
def test_impossible_experts_are_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_hf_dict({**FIELDS, **change})
