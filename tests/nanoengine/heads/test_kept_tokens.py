"""Samples that say what was kept when each token was drawn: log-probs and gradients over that."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_trees import VOCAB, make_model, random_tree
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.heads.kept_tokens import kept_logprobs
from nanoengine.heads.scorer import Scorer
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, TopTokens, make_micro_batches
from nanoengine.state.whole_engine import Engine

TEMPERATURE = 0.8


def with_kept(chance: random.Random, sample: Sample) -> Sample:
    """At each counted token some of the vocabulary, and the token; at some nothing, which is all of
    it. Two samples that count the same prediction keep different tokens there."""
    kept: list[list[int]] = []
    for token, counts in zip(sample.tokens, sample.loss_mask, strict=True):
        others = chance.sample(range(VOCAB), chance.choice((0, 3, 20, VOCAB)))
        is_cut = counts and chance.random() < 0.9
        kept.append(sorted({token, *others}) if is_cut else [])
    return replace(sample, kept=kept)


def random_batch(seed: int) -> list[Sample]:
    chance = random.Random(seed)
    trees = [random_tree(chance, f"{seed}-{tree}") for tree in range(8)]
    return [with_kept(chance, sample) for tree in trees for sample in tree]


def loss_of_tokens(
    logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Not linear in a log-prob, so each copy of a shared one has a slope of its own."""
    assert entropy_T is not None
    advantage_T = micro.fields_T["advantage"]
    token_T = -advantage_T * (logp_T + 1).exp() - 0.05 * advantage_T.square() * entropy_T
    return (token_T * micro.loss_mask_T).sum(), {}


def dense(model: Transformer, samples: list[Sample]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """log q, its entropy and the loss with the whole tokens x vocabulary tensor, by autograd."""
    logps, entropies, loss = [], [], torch.zeros((), dtype=torch.float64)
    for one in samples:
        ids = torch.tensor(one.tokens[:-1])
        cu = torch.tensor([0, len(ids)], dtype=torch.int32)
        hidden = model(ids, packed_positions(cu), PackedContext(cu, len(ids)))
        z = hidden @ model.lm_head_weight.t() / TEMPERATURE
        kept = one.kept or [[]] * len(one.tokens)
        for row, columns in enumerate(kept[1:]):
            if columns:
                out = torch.ones(VOCAB, dtype=torch.bool)
                out[columns] = False
                z = z.masked_fill(out & (torch.arange(len(z)) == row).unsqueeze(1), -torch.inf)
        logq = torch.log_softmax(z, -1)
        own = logq.gather(1, torch.tensor(one.tokens[1:]).unsqueeze(1)).squeeze(1)
        entropy = -(logq.exp() * logq.clamp(min=-1e9)).sum(-1)
        mask = torch.tensor(one.loss_mask[1:], dtype=torch.float64)
        advantage = torch.tensor(one.fields["advantage"][1:]).double()  # fields are fp32
        token = -advantage * (own + 1).exp() - 0.05 * advantage.square() * entropy
        loss = loss + (token * mask).sum()
        logps.append((own * mask).detach())
        entropies.append((entropy * mask).detach())
    return logps, entropies, loss


def trained(samples: list[Sample], **options: Any) -> tuple[Engine, dict[str, float]]:
    config = EngineConfig(dtype="fp64", max_grad_norm=0.0, **options)
    engine = Engine(make_model(), config)
    stats = engine.train_step(samples, loss_of_tokens, temperature=TEMPERATURE, entropy=True)
    return engine, stats


WAYS: dict[str, dict[str, Any]] = {
    "separate rows": {"micro_batch_tokens": 10_000},
    "small micro-batches": {"micro_batch_tokens": 16},
    "trees": {"micro_batch_tokens": 10_000, "share_prefix": True},
    "cut trees": {"micro_batch_tokens": 40, "share_prefix": True},
    "recomputed activations": {"micro_batch_tokens": 64, "activation_checkpointing": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_an_update_is_that_of_the_dense_log_q(seed: int, way: str) -> None:
    samples = random_batch(seed)
    model = make_model()
    logps, entropies, loss = dense(model, samples)
    loss.backward()
    engine, stats = trained(samples, **WAYS[way])
    # the rope tables of the dense one are fp32
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-6)
    found = [*engine.last_logps, *engine.last_entropies]
    for mine_T, theirs_T in zip(found, [*logps, *entropies], strict=True):
        torch.testing.assert_close(mine_T[1:].double(), theirs_T, rtol=0, atol=1e-6)
    for (name, mine), theirs in zip(
        engine.model.named_parameters(), model.parameters(), strict=True
    ):
        assert theirs.grad is not None
        error = float((mine.main_grad - theirs.grad).norm() / theirs.grad.norm())
        assert error < 1e-6, (name, error)


def test_an_update_that_ignored_what_was_kept_would_be_another() -> None:
    samples = random_batch(0)
    kept, _ = trained(samples)
    ignored, _ = trained([replace(sample, kept=None) for sample in samples])
    for (name, mine), theirs in zip(
        kept.model.named_parameters(), ignored.model.parameters(), strict=True
    ):
        difference = (mine.main_grad - theirs.main_grad).norm() / theirs.main_grad.norm()
        assert difference > 0.05, name


def test_samples_that_kept_different_tokens_are_not_scored_as_one() -> None:
    """Both count token 7 behind the same prompt, and keep different tokens there."""
    wide = Sample(tokens=[3, 4, 7], loss_mask=[0, 0, 1], group="g", kept=[[], [], [7, 8, 9]])
    narrow = replace(wide, kept=[[], [], [7]])
    (micro,) = make_micro_batches([wide, narrow], 100, share_prefix=True)
    assert micro.num_rows == 2 and micro.scored_Q is None
    (same,) = make_micro_batches([wide, replace(wide)], 100, share_prefix=True)
    assert same.scored_Q is not None and same.scored_Q.tolist() == [1]
    engine = Engine(make_model(), EngineConfig(dtype="fp64", share_prefix=True))
    first, second = engine.forward_logprobs([wide, narrow])
    assert first[2] < 0 and second[2] == 0  # of one token the log-prob is 0


def test_a_reference_scores_over_the_policys_own_tokens() -> None:
    """A KL of a policy to its copy is exactly 0."""
    samples = random_batch(1)
    engine = Engine(make_model(), EngineConfig(dtype="fp64"))
    mine = engine.forward_logprobs(samples, temperature=TEMPERATURE, only_masked=True)
    theirs = Scorer(make_model()).forward_logprobs(samples, temperature=TEMPERATURE)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_samples_with_and_without_it_go_together() -> None:
    """A run that was resumed with other options trains on rollouts of both kinds."""
    samples = random_batch(2)
    mixed = [one if i % 2 else replace(one, kept=None) for i, one in enumerate(samples)]
    engine = Engine(make_model(), EngineConfig(dtype="fp64", micro_batch_tokens=64))
    together = engine.forward_logprobs(mixed, only_masked=True)
    alone = [engine.forward_logprobs([one], only_masked=True)[0] for one in mixed]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_what_has_no_log_probs_over_kept_tokens_is_refused() -> None:
    model = make_model()
    engine = Engine(model, EngineConfig(dtype="fp64"))
    top = TopTokens(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))
    both = Sample(tokens=[3, 4, 7], loss_mask=[0, 0, 1], kept=[[], [], [7, 8]], top=top)
    with pytest.raises(ValueError, match="one id for each row"):
        engine.forward_logprobs([both])
    with pytest.raises(ValueError, match="kept has 2 entries for 3 tokens"):
        Sample(tokens=[3, 4, 7], loss_mask=[0, 0, 1], kept=[[], [7, 8]])
    wrong = Sample(tokens=[3, 4, 7], loss_mask=[0, 0, 1], kept=[[], [], [8, 9]])
    with pytest.raises(ValueError, match="does not keep its own token 7"):
        engine.forward_logprobs([wrong])
    model.split.size = 2
    with pytest.raises(ValueError, match="train such samples with tp=1"):
        kept_logprobs(model, [[1]])
