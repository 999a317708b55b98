"""The estimator against parameters, buffers and saved activations that really exist."""

from __future__ import annotations

import dataclasses
import json
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.formats.families import FAMILIES
from nanoengine.model.attention import PackedContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.stage import Stage, split_layers
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoengine.plan import estimate
from nanoengine.plan.estimate import model_shape
from nanoengine.plan.footprint import (
    Plan,
    forward_flops,
    layer_activation_bytes,
    mfu,
    num_params,
    rank_memory,
    rank_params,
    train_flops,
    training_widths,
    weight_bytes,
)
from nanoengine.state.whole_engine import Engine

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama3.1-8b": 8_030_261_248,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}


def small(family: str, tied: bool = True) -> ModelConfig:
    return ModelConfig(
        model_type=family,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=56,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        tie_word_embeddings=tied,
        attention_bias=family == "qwen2",
        qk_norm=FAMILIES[family].qk_norm != "none",
        max_position_embeddings=64,
        local_rope_theta=FAMILIES[family].local_theta,
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert num_params(model_shape(name)) == PUBLISHED[name]


DENSE = [name for name, family in FAMILIES.items() if not family.experts and family.vision is None]


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 3), (2, 2)])
def test_a_ranks_parameters_are_those_its_stage_has(
    family: str, tied: bool, tp: int, pp: int
) -> None:
    config = small(family, tied)
    split = None
    if tp > 1:
        split = TensorParallel(Mesh(Layout(tp=tp), 0, dist.HashStore()))
    for rank in range(pp):
        stage = Stage(config, rank, pp, split=split)
        found = sum(parameter.numel() for parameter in stage.parameters())
        assert rank_params(config, Plan(tp=tp, pp=pp), rank) == found


def test_layers_are_dealt_evenly_and_the_first_stages_take_the_rest() -> None:
    assert split_layers(7, 3) == [range(3), range(3, 5), range(5, 7)]
    with pytest.raises(ValueError, match="3 pipeline stages: more than the 2 layers"):
        split_layers(2, 3)


def saved_bytes(config: ModelConfig, dtype: torch.dtype, num_tokens: int) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once, weights left out."""
    model = Transformer(config, dtype)
    model.init_weights(0)
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.arange(num_tokens) % config.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, torch.arange(num_tokens), PackedContext.from_lengths([num_tokens]))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activation_bytes_of_a_layer_are_those_autograd_keeps(family: str, dtype: str) -> None:
    config = small(family)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    shorter = dataclasses.replace(config, num_layers=3)
    one_layer = saved_bytes(config, kind, 24) - saved_bytes(shorter, kind, 24)
    assert layer_activation_bytes(config, Plan(dtype=dtype, on_cpu=True), 24) == one_layer


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_gradients_and_optimizer_are_the_engines_buffers(dtype: str) -> None:
    config = small("llama")
    engine = Engine(Transformer(config), EngineConfig(dtype=dtype))  # type: ignore[arg-type]
    optimizer = engine.optimizer
    memory = rank_memory(config, Plan(dtype=dtype, on_cpu=True), 0, 16, 1)
    states = [optimizer.exp_avg, optimizer.exp_avg_sq]
    states += [s.remainder for s in optimizer.states if s.remainder is not None]
    found = {
        "params": sum(p.numel() * p.element_size() for p in engine.model.parameters()),
        "grads": sum(bucket.grad.nbytes for bucket in optimizer.buckets),
        "optimizer": sum(state.nbytes for state in states),
    }
    for name, num_bytes in found.items():  # the flat buffers round each parameter up
        assert getattr(memory, name) == pytest.approx(num_bytes, rel=0.04)


def test_sharding_divides_what_each_zero_stage_says() -> None:
    """Worked by hand: 18 bytes a parameter in bf16, over four ranks, whether they share samples or
    the tokens of one."""
    config = small("llama")
    params = num_params(config)
    for zero, (weights, grads, states) in enumerate(
        [(2, 4, 12), (2, 4, 3), (2, 1, 3), (0.5, 1, 3)]
    ):
        for plan in (Plan(dp=4, zero=zero), Plan(dp=2, cp=2, zero=zero)):
            memory = rank_memory(config, plan, 0, 16, 1)
            assert memory.params == weights * params
            assert memory.grads == grads * params
            assert memory.optimizer == states * params


def test_a_rest_of_the_batch_is_a_micro_batch_too() -> None:
    job = estimate.Workload(model=small("llama"), seq_len=8, batch_tokens=100, micro_tokens=16)
    assert [job.num_micro(Plan(dp=dp)) for dp in (1, 2, 4, 8)] == [7, 4, 2, 1]


def test_a_model_with_experts_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(
        small("qwen3"), model_type="qwen3_moe", num_experts=4, num_experts_per_token=2,
        moe_intermediate_size=8,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf_dict()))
    with pytest.raises(ValueError, match="num_experts=4: experts are not counted"):
        table("--model", str(tmp_path), "--gpus", "2")


def test_messages_and_mfu_by_hand() -> None:
    """1 GB among 4 ranks at 100 GB/s: a ring moves 3 quarters twice, 15 ms, and 6 latencies."""
    assert estimate.all_reduce_s(1e9, 4, 10e-6, 100e9) == pytest.approx(15.06e-3)
    assert estimate.all_gather_s(1e9, 4, 10e-6, 100e9) == pytest.approx(7.53e-3)
    assert estimate.all_reduce_s(1e9, 1, 10e-6, 100e9) == 0
    config = small("llama")
    # per token and layer: q 32x48, k and v 32x24, out 48x32, three of 32x56; attention 2·48·16
    layer = 2 * (32 * 48 + 2 * 32 * 24 + 48 * 32 + 3 * 32 * 56) + 2 * 48 * 16
    assert forward_flops(config, 10, 16) == (10 * layer, 10 * 2 * 96 * 32)
    assert train_flops(config, 1, 16) == 3 * (4 * layer + 2 * 96 * 32)
    assert mfu(config, 1000.0, 16, 1e9, 2) == pytest.approx(
        3 * (4 * layer + 2 * 96 * 32) * 1000 / 2e9
    )


def table(*arguments: str) -> str:
    out = StringIO()
    estimate.run(arguments, Console(file=out, width=160))
    return out.getvalue()


def test_the_table_says_which_layouts_fit() -> None:
    text = table("--model", "qwen3-4b", "--gpus", "8")
    assert "10 of 10 layouts fit 80 GB (h100)" in text and "pp2·dp2·tp2" in text
    text = table("--model", "qwen3-32b", "--gpus", "1", "--hardware", "h200")
    assert "0 of 1 layouts fit 141 GB" in text and "NO" in text
    text = table("--model", "qwen3-32b", "--gpus", "16", "--tp", "8", "--pp", "2", "--zero", "0")
    assert "0 of 1 layouts fit" in text or "1 of 1 layouts fit" in text
    assert "tp=16: must divide num_kv_heads=8" in table("--model", "qwen3-8b", "--gpus", "16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt-5", "--gpus", "8"), "model='gpt-5': neither a folder nor a known name"),
        (("--model", "qwen3-4b", "--gpus", "8", "--tp", "3"), "gpus=8: not a multiple of tp=3"),
        (("--model", "qwen3-4b", "--gpus", "0"), "gpus=0: must be at least 1"),
        (("--model", "qwen3-4b", "--gpus", "16", "--tp", "16"), "tp=16: must divide num_kv_heads"),
        (("--model", "qwen3-4b", "--gpus", "8", "--zero", "5"), "zero=5: must be 0, 1, 2 or 3"),
        (("--model", "qwen3-4b", "--gpus", "8", "--micro-tokens", "9"), "micro_tokens=9: a seque"),
        (("--model", "qwen3-4b", "--gpus", "2", "--efficiency", "2"), "efficiency=2.0: must be"),
    ],
)
def test_impossible_questions_are_answered_with_the_rule(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        table(*arguments)


def test_what_a_parameter_takes_to_train_is_worked_by_hand() -> None:
    """Weight, gradient, masters and two moments; a CPU keeps half a master beside bf16."""
    assert training_widths("bf16") == (2, 4, 4 + 8)
    assert training_widths("bf16", on_cpu=True) == (2, 4, 2 + 8)
    assert training_widths("fp32") == (4, 4, 8)
    assert training_widths("fp64", on_cpu=True) == (8, 8, 16)
    assert weight_bytes(model_shape("qwen3-4b"), torch.bfloat16) == 2 * PUBLISHED["qwen3-4b"]
