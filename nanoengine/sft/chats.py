"""Supervised fine-tuning: chats as samples, their order, and the loss on what the assistant wrote.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

A jsonl file has one such object a line; `tools` may stand beside `messages`. Only what the
assistant wrote is trained on, with the end of its turn: a turn's tokens are what the rendered chat
has beyond the prompt that generation would start from, up to the last end-of-turn token.

    engine.train_step(samples, sft_loss, num_loss_tokens)      # mean over the tokens of the batch

Parts of messages may be pictures, for a tokenizer of a model that sees: by a path relative to the
file, a data URL, or in a column "images" (vision/picture_chats.py).
A sample may carry a field "weight" (per token); without one every masked token weighs 1.
Left out: chat templates that rewrite earlier turns (the line is refused), and text without a chat.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from nanoengine.packing import MicroBatch, Sample
from nanoengine.text.tokenizer import ChatTokenizer

STORED_CHAT = "nanoengine.vision.picture_chats:stored_chat"
"""Has a chat's pictures in a store."""


class SftLoss:
    """Sum of -logp * mask * weight; the stat `num_tokens` counts the masked tokens."""

    def __call__(
        self, logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        weight_T = micro.loss_mask_T
        if "weight" in micro.fields_T:
            weight_T = weight_T * micro.fields_T["weight"]
        return -(logp_T * weight_T).sum(), {"num_tokens": torch.count_nonzero(micro.loss_mask_T)}

    def foreseen_logp(self, micro: MicroBatch) -> Tensor:
        """Any: the gradient is the same at all of them."""
        return torch.zeros_like(micro.loss_mask_T)


sft_loss = SftLoss()


def num_loss_tokens(samples: Sequence[Sample]) -> float:
    """The denominator of a mean over the weighted tokens of the whole batch."""
    total = 0.0
    for sample in samples:
        weights = sample.fields.get("weight")
        for t, is_counted in enumerate(sample.loss_mask):
            if is_counted:
                total += weights[t] if weights is not None else 1.0
    return total


def chat_sample(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Sample:
    """The tokens of a chat, masked to those the assistant wrote, with its pictures. `ValueError`
    for a chat with pictures where the tokenizer reads text."""
    tokens = tokenizer.encode_chat(messages, add_generation_prompt=False, tools=tools)
    mask = [0] * len(tokens)
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        prompt = tokenizer.encode_chat(messages[:i], add_generation_prompt=True, tools=tools)
        through = tokenizer.encode_chat(messages[: i + 1], add_generation_prompt=False, tools=tools)
        if tokens[: len(through)] != through or through[: len(prompt)] != prompt:
            raise ValueError(
                f"message {i}: this chat template renders a turn differently once others follow; "
                "split the chat so that it ends with this message"
            )
        ends = [t for t in range(len(prompt), len(through)) if through[t] in tokenizer.eos_ids]
        for t in range(len(prompt), ends[-1] + 1 if ends else len(through)):
            mask[t] = 1
    if not any(mask):
        raise ValueError("no message of role 'assistant', so there is nothing to train on")
    images = tokenizer.images_in(tokens, messages, 0)
    return Sample(tokens=tokens, loss_mask=mask, images=images)


def read_chats(
    path: Path | str, tokenizer: ChatTokenizer, max_tokens: int
) -> tuple[list[Sample], int]:
    """(samples, number of chats left out because they exceed `max_tokens`). `ValueError` names the
    line that is no chat."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"data={str(path)!r}: no such file; give a jsonl file of messages")
    samples, num_long = [], 0
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                if not isinstance(fields, dict) or not isinstance(fields.get("messages"), list):
                    raise ValueError('expected an object with a list under "messages"')
                messages = fields["messages"]
                if (store := getattr(tokenizer, "store", None)) is not None:
                    shown = fields.get("images")
                    messages = resolve_name(STORED_CHAT)(messages, shown, store, file.parent)
                sample = chat_sample(tokenizer, messages, fields.get("tools"))
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{file}, line {number}: {error}") from error
            if len(sample.tokens) > max_tokens:
                num_long += 1
            else:
                samples.append(sample)
    if not samples:
        raise ValueError(f"{file}: no chat of at most {max_tokens} tokens; raise --max-tokens")
    return samples, num_long


@dataclass
class Order:
    """Shuffled epochs without end: a function of the seed and of how many were taken."""

    num_samples: int
    seed: int
    taken: int = 0

    def take(self, count: int) -> list[int]:
        """The next indices."""
        found: list[int] = []
        while len(found) < count:
            epoch, position = divmod(self.taken, self.num_samples)
            shuffled = list(range(self.num_samples))
            random.Random(f"{self.seed}/{epoch}").shuffle(shuffled)
            chosen = shuffled[position : position + count - len(found)]
            self.taken += len(chosen)
            found += chosen
        return found
