"""Random families of sequences that share prefixes to any depth, and a model to train on them."""

from __future__ import annotations

import random
from typing import Any

import torch

from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample

VOCAB = 60


def make_model(family: str = "llama", **switches: Any) -> Transformer:
    config = ModelConfig(
        model_type=family,
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        max_position_embeddings=256,
        **switches,
    )
    model = Transformer(config, torch.float64)
    model.init_weights(seed=0, std=0.2)
    return model


def random_tree(chance: random.Random, group: str) -> list[Sample]:
    """Samples of `random_sequences`, each token with a mask and an advantage of its own."""
    return [
        Sample(
            tokens=tokens,
            loss_mask=[0, *(int(chance.random() < 0.7) for _ in tokens[1:])],
            fields={"advantage": [chance.uniform(-2, 2) for _ in tokens]},
            group=group,
        )
        for tokens in random_sequences(chance)
    ]


def random_sequences(chance: random.Random) -> list[list[int]]:
    """Each goes on from a random place in an earlier one, be that inside an action, its end (a
    chain), or its end with nothing after it (the same sequence again)."""
    sequences = [[chance.randrange(VOCAB) for _ in range(chance.randint(2, 9))]]
    for _ in range(chance.randint(1, 7)):
        earlier = chance.choice(sequences)
        kept = earlier[: chance.randint(0, len(earlier))]
        own = [chance.randrange(VOCAB) for _ in range(chance.choice((0, 1, 3, 8)))]
        sequences.append((kept + own) if len(kept + own) > 1 else list(earlier))
    chance.shuffle(sequences)
    return sequences
