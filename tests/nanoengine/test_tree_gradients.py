"""The update of a tree against that of separate rows, in fp64, on random trees of any shape."""

from __future__ import annotations

import random

import pytest
import torch

from nanoengine.engine import Engine, EngineConfig
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, make_micro_batches

VOCAB = 60
NUM_STEPS, TREES_A_STEP = 10, 20
BUDGETS = (10_000, 160, 40)  # whole trees, some cut, nearly all cut


def make_model() -> Transformer:
    config = ModelConfig(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        max_position_embeddings=256,
    )
    model = Transformer(config, torch.float64)
    model.init_weights(seed=0, std=0.2)
    return model


def random_tree(chance: random.Random, group: str) -> list[Sample]:
    """Samples that each go on from a random place in an earlier one, be that inside an action, its
    end (a chain), or its end with nothing after it (the same sample again)."""
    sequences = [[chance.randrange(VOCAB) for _ in range(chance.randint(2, 9))]]
    for _ in range(chance.randint(1, 7)):
        earlier = chance.choice(sequences)
        kept = earlier[: chance.randint(0, len(earlier))]
        own = [chance.randrange(VOCAB) for _ in range(chance.choice((0, 1, 3, 8)))]
        sequences.append((kept + own) if len(kept + own) > 1 else list(earlier))
    chance.shuffle(sequences)
    return [
        Sample(
            tokens=tokens,
            loss_mask=[0, *(int(chance.random() < 0.7) for _ in tokens[1:])],
            fields={"advantage": [chance.uniform(-2, 2) for _ in tokens]},
            group=group,
        )
        for tokens in sequences
    ]


def loss_of_tokens(
    logp_T: torch.Tensor, entropy_T: torch.Tensor | None, micro: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Not linear in a log-prob, so each copy of a shared one has a slope of its own."""
    assert entropy_T is not None
    advantage_T = micro.fields_T["advantage"]
    token_T = -advantage_T * (logp_T + 1).exp() - 0.05 * advantage_T.square() * entropy_T
    return (token_T * micro.loss_mask_T).sum(), {}


def gradients(samples: list[Sample], **options: object) -> dict[str, torch.Tensor]:
    model = make_model()
    engine = Engine(model, EngineConfig(dtype="fp64", max_grad_norm=0.0, **options))  # type: ignore[arg-type]
    engine.train_step(samples, loss_of_tokens, temperature=0.8, entropy=True)
    return {name: p.main_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_the_gradient_of_a_tree_is_that_of_separate_rows(step: int) -> None:
    chance = random.Random(step)
    trees = [random_tree(chance, f"{step}-{tree}") for tree in range(TREES_A_STEP)]
    samples = [sample for tree in trees for sample in tree]
    expected = gradients(samples, micro_batch_tokens=10_000)
    found = gradients(samples, share_prefix=True, micro_batch_tokens=BUDGETS[step % len(BUDGETS)])
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / gradient.norm())
        assert error < 1e-10, (name, error)


def test_the_random_trees_have_every_shape() -> None:
    chance = random.Random(0)
    shapes = set()
    for _ in range(TREES_A_STEP):
        samples = random_tree(chance, "g")
        (micro,) = make_micro_batches(samples, 10_000, share_prefix=True)
        depth = []
        for parent in micro.prefix_of_S or [-1] * (len(micro.bounds) - 1):
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        shapes.add(f"depth {min(max(depth), 3)}")
        shapes |= {"forest"} if depth.count(0) > 1 else set()
        for a in samples:
            for b in samples:
                is_before = a is not b and b.tokens[: len(a.tokens)] == a.tokens
                if is_before:
                    shapes.add("equal" if len(a.tokens) == len(b.tokens) else "chain")
                    shapes |= (
                        {"other mask"} if a.loss_mask != b.loss_mask[: len(a.tokens)] else set()
                    )
    assert shapes >= {"depth 0", "depth 1", "depth 2", "depth 3", "equal", "chain", "forest"}
    assert "other mask" in shapes
