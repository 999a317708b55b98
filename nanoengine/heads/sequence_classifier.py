"""A sequence-classification folder (a reward model): a Transformer's body and a score head.

The folders are those that `transformers` writes for LlamaForSequenceClassification,
Qwen2ForSequenceClassification and Qwen3ForSequenceClassification with one label: the tensors of the
body under `model.`, and `score.weight` of shape [1, E]. The score of a sequence is read at its last
token that is not padding.

A `Scorer` reads such a model as it reads a policy, packed; so a sequence is a sample with one
token more, which counts, and whose "log-prob" is the score of the token before it. So an `Engine`
trains one, too (sft/pair_objectives.py): `classifier_of` a policy, then `save_sequence_classifier`.
Left out: several labels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from nanoengine.formats.families import family_of, sees
from nanoengine.formats.hf import check_finite, export_state, load_state, read_state, write_folder
from nanoengine.heads.scorer import Scorer
from nanoengine.model.config import ModelConfig
from nanoengine.model.linear import LogprobOptions
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample
from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer

_HEAD = "score.weight"
_TRUSTED = frozenset({"system"})  # the policy's own text may not spell this model's control tokens
_WITHOUT_CLASS = ("granite",)
"""Families that read text, of which `transformers` has no class for sequence classification."""


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


def classifier_class(model_type: str) -> str:
    """The class of `transformers` that reads a reward model of this family. `ValueError` where
    there is none."""
    if model_type in _WITHOUT_CLASS or sees(model_type):
        raise ValueError(
            f"model: transformers has no sequence classification for {model_type!r}, so nothing "
            "could read the reward model; choose a model of another family"
        )
    if model_type == "gemma3_text":  # the plain name is of the one that sees pictures
        return "Gemma3TextForSequenceClassification"
    return family_of(model_type).architecture.replace("CausalLM", "SequenceClassification")


def classifier_of(policy: Transformer) -> SequenceClassifier:
    """A copy of the policy's body, with a head of zeros: every score is 0 at first."""
    model = SequenceClassifier(policy.config, policy.dtype, str(policy.device))
    theirs = dict(policy.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "score_head":
                parameter.copy_(theirs[name])
    model.repack()
    return model


def save_sequence_classifier(model: SequenceClassifier, folder: str | Path) -> None:
    """Write a folder that `load_sequence_classifier` and `AutoModelForSequenceClassification` read;
    the tokenizer's files are the caller's. Not atomic."""
    state = dict(export_state(model)) | {_HEAD: model.score_head.detach()}
    write_folder(folder, model.config, state)
    file, name = Path(folder) / "config.json", classifier_class(model.config.model_type)
    label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    fields = json.loads(file.read_text()) | {"architectures": [name], **label}
    file.write_text(json.dumps(fields, indent=2) + "\n")


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
    samples = [rated_sample(list(ids), model.config.pad_id) for ids in sequences]
    scored = Scorer(model, micro_batch_tokens=micro_batch_tokens).forward_logprobs(samples)
    return [float(values[-1]) for values in scored]


def rated_chat(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> list[int]:
    """The ids of a chat as a reward model reads it: with its own template, whole, without tools.
    `ValueError` for one with pictures, which it does not see."""
    tokenizer.images_in((), messages, 0)
    return tokenizer.encode_chat(messages, add_generation_prompt=False, trusted_roles=_TRUSTED)


def rated_sample(ids: list[int], pad_id: int | None) -> Sample:
    """The sample of which the one counted "log-prob" is the score of `ids`; padding at the end is
    left out. ValueError for an empty one."""
    while len(ids) > 1 and ids[-1] == pad_id:
        ids.pop()
    if not ids:
        raise ValueError("an empty sequence has no score: give at least one token")
    return Sample(tokens=[*ids, 0], loss_mask=[0] * len(ids) + [1])
