"""A sequence-classification folder (a reward model): a Transformer's body and a score head.

The folders are those that `transformers` writes for LlamaForSequenceClassification,
Qwen2ForSequenceClassification and Qwen3ForSequenceClassification with one label: the tensors of the
body under `model.`, and `score.weight` of shape [1, E]. The score of a sequence is read at its last
token that is not padding.

A `Scorer` reads such a model as it reads a policy, packed; so a sequence is a sample with one
token more, which counts, and whose "log-prob" is the score of the token before it.
Left out: several labels, training (value_engine.py has a head that learns).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from nanoengine.formats.hf import check_finite, load_state, read_state
from nanoengine.heads.scorer import Scorer
from nanoengine.model.config import ModelConfig
from nanoengine.model.linear import LogprobOptions
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample

_HEAD = "score.weight"


class SequenceClassifier(Transformer):
    """A body with one score in place of the vocabulary."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        # A tied head is none of its own: `config` stays what the folder says, without one.
        super().__init__(replace(config, tie_word_embeddings=True), dtype, device)
        zeros = torch.zeros(1, config.hidden_size, dtype=dtype, device=device)
        self.score_head = nn.Parameter(zeros)

    def _repack_head(self) -> None:
        """There are no logits."""

    def logprobs(
        self, hidden_PE: Tensor, ids_P: Tensor, options: LogprobOptions | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores in the place of log-probs: of the sequence that ends before each id."""
        wide = torch.promote_types(hidden_PE.dtype, torch.float32)
        return (hidden_PE.to(wide) @ self.score_head.to(wide).t()).squeeze(1), None


def load_sequence_classifier(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> SequenceClassifier:
    """Read the folder. ValueError where it has no score head, or one of several labels."""
    tensors = dict(read_state(folder))
    head = tensors.pop(_HEAD, None)
    config = ModelConfig.from_folder(folder)
    if head is None or head.shape != (1, config.hidden_size):
        found = "no such tensor" if head is None else f"shape {tuple(head.shape)}"
        raise ValueError(
            f"{folder}: {_HEAD} must have shape (1, {config.hidden_size}), found {found}: give a "
            "sequence-classification folder with one label"
        )
    check_finite([(_HEAD, head)], "nothing was loaded; fetch the model again")
    model = SequenceClassifier(config, dtype, device)
    load_state(model, tensors.items())
    with torch.no_grad():
        model.score_head.copy_(head)
    return model.requires_grad_(False)


def score_sequences(
    model: SequenceClassifier, sequences: Sequence[Sequence[int]], micro_batch_tokens: int = 4096
) -> list[float]:
    """The score of each sequence of ids, packed into micro-batches; padding at an end is left
    out. ValueError for an empty one."""
    samples = [_sample(list(ids), model.config.pad_id) for ids in sequences]
    scored = Scorer(model, micro_batch_tokens=micro_batch_tokens).forward_logprobs(samples)
    return [float(values[-1]) for values in scored]


def _sample(ids: list[int], pad_id: int | None) -> Sample:
    while len(ids) > 1 and ids[-1] == pad_id:
        ids.pop()
    if not ids:
        raise ValueError("an empty sequence has no score: give at least one token")
    return Sample(tokens=[*ids, 0], loss_mask=[0] * len(ids) + [1])
