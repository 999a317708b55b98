"""The losses on pairs: by hand, against float64 numpy, TRL's formula, and whatever the packing."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, make_micro_batches
from nanoengine.sft.pair_loss import (
    REFERENCE,
    DpoLoss,
    PairLoss,
    ScoreLoss,
    num_pairs,
    pair_loss,
)
from nanoengine.state.whole_engine import Engine

BUDGET = 1 << 20


def sample(tokens: list[int], first: int, group: str, reference: float = 0.0) -> Sample:
    """Tokens of which those from `first` on count."""
    return Sample(
        tokens=tokens,
        loss_mask=[int(t >= first) for t in range(len(tokens))],
        fields={REFERENCE: [0.0] * (len(tokens) - 1) + [reference]},
        group=group,
    )


def random_pairs(rng: np.random.Generator, num: int, vocab: int = 40) -> list[Sample]:
    """Pairs with prompts of their own."""
    found = []
    for place in range(num):
        prompt = rng.integers(1, vocab, rng.integers(1, 6)).tolist()
        for _ in range(2):
            answer = rng.integers(1, vocab, rng.integers(1, 7)).tolist()
            reference = float(rng.normal(-20, 5))
            found.append(sample(prompt + answer, len(prompt), str(place), reference))
    return found


def packed(samples: list[Sample], budget: int = BUDGET) -> list[MicroBatch]:
    return make_micro_batches(samples, budget, share_prefix=True)


def spread(values: list[list[float]], micro: MicroBatch) -> Tensor:
    """What an engine hands a loss: of each sample one number a prediction."""
    return torch.tensor([x for i in micro.index for x in values[i][1:]], dtype=torch.float64)


def random_logps(rng: np.random.Generator, samples: list[Sample]) -> list[list[float]]:
    return [[float(rng.normal(-2, 1)) * m for m in one.loss_mask] for one in samples]


def test_dpo_by_hand() -> None:
    pair = [sample([5, 6, 7], 1, "a", -3.0), sample([5, 8], 1, "a", -4.0)]
    (micro,) = packed(pair)
    logp_T = spread([[0, -0.5, -1.5], [0, -4.5]], micro)
    # 0.1 * ((-2 + 3) - (-4.5 + 4)) = 0.15
    loss, stats = DpoLoss(0.1)(logp_T, None, micro)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-0.15)), abs=1e-12)
    said = {name: float(value) for name, value in stats.items()}
    assert said == pytest.approx(
        {
            "num_pairs": 1,
            "accuracy": 1,
            "margin": 0.15,
            "chosen_reward": 0.1,
            "rejected_reward": -0.05,
        }
    )
    smoothed, _ = DpoLoss(0.1, 0.2)(logp_T, None, micro)
    assert float(smoothed) == pytest.approx(float(loss) + 0.2 * 0.15, abs=1e-12)


def test_scores_by_hand() -> None:
    pair = [sample([5, 6, 0], 2, "a"), sample([5, 7, 0], 2, "a")]
    (micro,) = packed(pair)
    loss, stats = ScoreLoss()(spread([[0, 0, 2.0], [0, 0, 3.0]], micro), None, micro)
    assert float(loss) == pytest.approx(math.log(1 + math.e), abs=1e-12)  # margin -1
    assert (float(stats["accuracy"]), float(stats["margin"])) == (0, -1)


def test_both_losses_are_numpys_over_random_batches() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        samples = random_pairs(rng, int(rng.integers(1, 6)))
        logps = random_logps(rng, samples)
        beta, smoothing = float(rng.uniform(0.01, 2)), float(rng.uniform(0, 0.49))
        own = np.array([np.sum(values) for values in logps]).reshape(-1, 2)
        # fp32, as a field of a batch is
        theirs = np.array([np.float32(one.fields[REFERENCE][-1]) for one in samples], np.float64)
        rewards = {"dpo": beta * (own - theirs.reshape(-1, 2)), "scores": own}
        for name, loss in (
            ("dpo", DpoLoss(beta, smoothing)),
            ("scores", ScoreLoss(smoothing)),
        ):
            margins = rewards[name][:, 0] - rewards[name][:, 1]
            expected = (1 - smoothing) * np.logaddexp(0, -margins)
            expected += smoothing * np.logaddexp(0, margins)
            found, right = 0.0, 0.0
            for micro in packed(samples, budget=int(rng.integers(15, 60))):
                part, stats = loss(spread(logps, micro), None, micro)
                found, right = found + float(part), right + float(stats["accuracy"])
            assert found == pytest.approx(expected.sum(), rel=1e-9)
            assert right == (margins > 0).sum()


def test_dpo_is_the_sigmoid_loss_of_trl() -> None:
    """Its formula, term by term: log-ratios of chosen and rejected, policy minus reference."""
    torch.manual_seed(0)
    chosen, rejected, ref_chosen, ref_rejected = torch.randn(4, 30, dtype=torch.float64) * 5
    beta, smoothing = 0.3, 0.1
    delta = (chosen - rejected) - (ref_chosen - ref_rejected)
    log_sigmoid = torch.nn.functional.logsigmoid
    trl = -log_sigmoid(beta * delta) * (1 - smoothing) - log_sigmoid(-beta * delta) * smoothing
    ours = pair_loss(beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected), smoothing)
    torch.testing.assert_close(ours, trl, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [DpoLoss(0.7, 0.1), ScoreLoss(0.1)], ids=["dpo", "scores"])
def test_gradients_are_those_of_finite_differences(loss: PairLoss) -> None:
    rng = np.random.default_rng(1)
    samples = random_pairs(rng, 3)
    (micro,) = packed(samples)
    logp_T = spread(random_logps(rng, samples), micro).requires_grad_()
    assert torch.autograd.gradcheck(lambda logp_T: loss(logp_T, None, micro)[0], logp_T)


def test_far_margins_stay_finite() -> None:
    margin_P = torch.tensor([-1000.0, 1000.0], dtype=torch.float64)
    assert pair_loss(margin_P).tolist() == [1000.0, 0.0]


def test_a_pair_that_was_cut_is_not_trained_on() -> None:
    samples = random_pairs(np.random.default_rng(2), 2)
    loose = [replace(one, group=None) for one in samples]
    micros = make_micro_batches(loose, 1)
    assert len(micros) == 4
    with pytest.raises(AssertionError, match="a pair was cut"):
        ScoreLoss()(spread([[0.0] * len(s.tokens) for s in samples], micros[0]), None, micros[0])


def tiny_engine(budget: int) -> Engine:
    torch.manual_seed(0)
    shape = ModelConfig(
        model_type="qwen3", vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2,
        num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True,
    )  # fmt: skip
    model = Transformer(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn_like(parameter)
            parameter.copy_(1 + noise if "norm" in name else noise)
    return Engine(model, EngineConfig(share_prefix=True, micro_batch_tokens=budget))


def test_the_gradient_does_not_depend_on_how_the_batch_is_cut() -> None:
    samples = random_pairs(np.random.default_rng(3), 7)
    grads, losses, cuts = [], [], []
    for budget in (14, 30, 1000):
        engine = tiny_engine(budget)
        cuts.append(len(packed(samples, budget)))
        engine.optimizer.zero_grad()
        loss, _ = engine.forward_backward(samples, DpoLoss(0.5, 0.1), num_pairs(samples))
        losses.append(loss)
        grads.append(torch.cat([bucket.grad.flatten() for bucket in engine.optimizer.buckets]))
    assert cuts[0] > cuts[1] > cuts[2] == 1
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-4, atol=1e-6)
    assert grads[0].norm() > 0.1
