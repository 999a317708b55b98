"""Scoring without training, and training without log-probs: Scorer and ValueEngine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.heads.scorer import Scorer
from nanoengine.heads.value_engine import ValueEngine, ValueModel
from nanoengine.model.attention import PackedContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample
from nanoengine.state.whole_engine import Engine


def make_policy(dtype: torch.dtype = torch.float32, *, tied: bool = True) -> Transformer:
    config = ModelConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Transformer(config, dtype)
    model.init_weights(seed=3, std=0.15)
    return model


def a_group(num_members: int = 3) -> list[Sample]:
    prompt = [5, 9, 33, 2]
    return [
        Sample(tokens=[*prompt, 7 + i, 11, 12 + i], loss_mask=[0] * 4 + [1] * 3, group="g")
        for i in range(num_members)
    ]


def squares(value_T: Tensor, _: Tensor | None, micro: MicroBatch) -> Any:
    return ((value_T - 1) ** 2 * micro.loss_mask_T).sum(), {}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_frozen_policy_has_the_bits_of_the_engine_and_no_gradient(dtype: Any) -> None:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    engine = Engine(make_policy(), EngineConfig(dtype=dtype, share_prefix=True))
    frozen = Scorer(
        make_policy(kind).requires_grad_(False), micro_batch_tokens=16, share_prefix=True
    )
    theirs = engine.forward_logprobs(a_group(), temperature=0.7, only_masked=True)
    mine = frozen.forward_logprobs(a_group(), temperature=0.7)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not any(parameter.requires_grad for parameter in frozen.model.parameters())


def test_a_value_is_read_before_its_token_and_from_the_policy_s_hidden_state() -> None:
    model = ValueModel(make_policy(tied=False))
    with torch.no_grad():
        model.value_head.copy_(torch.linspace(-1, 1, 32).unsqueeze(0))
    engine = ValueEngine(model, EngineConfig(dtype="fp32"))
    sample = a_group(1)[0]
    (values,) = engine.forward_values([sample])
    ids = torch.tensor(sample.tokens)
    context = PackedContext(torch.tensor([0, 7], dtype=torch.int32), 7)
    with torch.no_grad():
        hidden = make_policy(tied=False)(ids, torch.arange(7), context)
    by_hand = hidden @ torch.linspace(-1, 1, 32)
    torch.testing.assert_close(values[4:], by_hand[3:6], rtol=0, atol=1e-6)
    assert not values[:4].any()
    changed = Sample(tokens=[*sample.tokens[:-1], 1], loss_mask=sample.loss_mask)
    assert torch.equal(engine.forward_values([changed])[0], values)  # not of the token itself


def test_the_gradient_of_the_head_is_that_of_a_linear_regression() -> None:
    engine = ValueEngine(ValueModel(make_policy()), EngineConfig(dtype="fp64", lr=1e-2))
    sample = a_group(1)[0]
    result = engine.train_step([sample], squares)
    assert result["loss"] == pytest.approx(3.0)  # three values of 0 that should be 1
    context = PackedContext(torch.tensor([0, 7], dtype=torch.int32), 7)
    with torch.no_grad():
        hidden = make_policy(torch.float64)(torch.tensor(sample.tokens), torch.arange(7), context)
    by_hand = (-2 * hidden[3:6]).sum(0)
    # a head of zeros sends nothing into the body: this is the whole gradient
    assert result["grad_norm"] == pytest.approx(float(by_hand.norm()), rel=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_what_truncation_kept_of_the_vocabulary_changes_no_value_and_no_update(tied: bool) -> None:
    config = EngineConfig(dtype="fp32", lr=1e-2, share_prefix=True)
    one, other = (ValueEngine(ValueModel(make_policy(tied=tied)), config) for _ in range(2))
    plain = a_group()
    drawn = [
        replace(
            sample,
            kept=[
                sorted({token, 3, 40}) if is_action else []
                for token, is_action in zip(sample.tokens, sample.loss_mask, strict=True)
            ],
        )
        for sample in plain
    ]
    for _ in range(3):  # after the first one values are not 0
        assert one.train_step(plain, squares) == other.train_step(drawn, squares)
        pairs = zip(one.forward_values(plain), other.forward_values(drawn), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert isinstance(other.model, ValueModel) and other.model.value_head.any()


def test_a_critic_resumes_bit_equal(tmp_path: Path) -> None:
    config = EngineConfig(dtype="bf16", lr=1e-2, share_prefix=True, micro_batch_tokens=16)
    one, other = (ValueEngine(ValueModel(make_policy()), config) for _ in range(2))
    for _ in range(3):
        one.train_step(a_group(), squares)
    one.save(tmp_path)
    other.load(tmp_path)
    for engine in (one, other):
        engine.train_step(a_group(), squares)
    pairs = zip(one.forward_values(a_group()), other.forward_values(a_group()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert one.version == other.version == 4
