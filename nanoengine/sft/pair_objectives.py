"""Learning from pairs of answers: DPO, which trains the policy, and a reward model.

Both answers of a pair are a group of which the prompt is read once, and lie in one micro-batch; a
pair of more rows than `micro_batch_tokens` gets one of its own. The losses are in pair_loss.py, the
file is preferences.py's.

DPO counts the tokens of the answer alone: what the assistant wrote after the prompt, not its turns
inside of the prompt. The reference is the policy as it was before the first step; the log-probs
that it gives the pairs that will be drawn are computed once, and kept in `reference.json`, so that
a run that goes on compares with the same numbers. They are found by the places of the pairs in the
file, so it must be the same one (`fingerprint_of`).

A reward model starts with the policy's body and a score head of zeros. It reads a chat as it will
when it judges (`rated_chat`), and its folder is one that `transformers` loads.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoengine.config import EngineConfig
from nanoengine.formats.hf import load_model
from nanoengine.formats.sources import resolve_model
from nanoengine.heads.sequence_classifier import (
    SequenceClassifier,
    classifier_class,
    classifier_of,
    rated_chat,
    rated_sample,
    save_sequence_classifier,
)
from nanoengine.model.config import ModelConfig
from nanoengine.packing import Sample, read_keys
from nanoengine.parallel.dealing import deal
from nanoengine.parallel.layout import WORLD
from nanoengine.parallel.mesh import Mesh
from nanoengine.prefix_tree import added_rows, depth_first, num_shared
from nanoengine.sft.chats import chat_sample
from nanoengine.sft.objective import Example, Objective, longest
from nanoengine.sft.pair_loss import REFERENCE, DpoLoss, ScoreLoss, num_pairs
from nanoengine.sft.preferences import Preference, bad_lines, read_preferences
from nanoengine.sft.sft_config import SftConfig
from nanoengine.state.checkpoint import write_synced
from nanoengine.state.whole_engine import Engine
from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer

REFERENCE_FILE = "reference.json"
PAIRS_AT_ONCE = 64
"""So many pairs are scored by the reference in one call, so that memory does not grow with the
file."""


class PairObjective(Objective):
    """Reads pairs and has both samples of each in one micro-batch."""

    unit = "pairs"
    weight = staticmethod(num_pairs)

    def read(self, tokenizer: ChatTokenizer) -> tuple[list[Example], int]:
        file, most = self.config.examples_file, self.config.max_tokens
        examples, num_long, problems = list[Example](), 0, dict[int, ValueError]()
        for number, said in read_preferences(file):
            try:
                pair = self._pair(said, tokenizer)
            except (ValueError, AttributeError) as error:
                problems[number] = ValueError(str(error))
                continue
            if max(len(sample.tokens) for sample in pair) > most:
                num_long += 1
            else:
                examples.append(pair)
        if problems:
            raise bad_lines(file, problems)
        if not examples:
            raise ValueError(f"{file}: no pair of at most {most} tokens; raise --max-tokens")
        return examples, num_long

    def _pair(self, said: Preference | ValueError, tokenizer: ChatTokenizer) -> Example:
        if isinstance(said, ValueError):
            raise said
        pair = tuple(self.sample(tokenizer, said, one) for one in (said.chosen, said.rejected))
        if not num_shared(*map(read_keys, pair)):
            raise ValueError("chosen and rejected share no token, so they answer no same prompt")
        return pair

    @abstractmethod
    def sample(self, tokenizer: ChatTokenizer, pair: Preference, answer: list[Message]) -> Sample:
        """The sample of one of the answers."""

    def engine_config(self, examples: Sequence[Example]) -> EngineConfig:
        """A budget that no pair exceeds, for a pair is not cut."""
        config = super().engine_config(examples)
        most = max([config.micro_batch_tokens, *map(num_rows, examples)])
        return replace(config, share_prefix=True, micro_batch_tokens=most)

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        """Each pair a group of its own: at the seam of two epochs a batch may have one twice."""
        return [
            replace(sample, group=str(place))
            for place, pair in enumerate(examples)
            for sample in pair
        ]

    def row(self, result: Mapping[str, float]) -> dict[str, float]:
        """Means over the pairs of the batch."""
        means = ("accuracy", "margin", "chosen_reward", "rejected_reward")
        pairs = result["num_pairs"]
        return dict(result) | {name: result[name] / pairs for name in means}

    def describe(self, row: Mapping[str, Any]) -> str:
        return f"right {row['accuracy']:.0%} margin {row['margin']:.3f} "


class DpoObjective(PairObjective):
    """DPO on the answers' tokens."""

    written = (REFERENCE_FILE,)

    def __init__(self, config: SftConfig) -> None:
        super().__init__(config)
        self.loss = DpoLoss(config.beta, config.label_smoothing)
        self._reference: dict[int, list[float]] = {}
        self._fingerprint = ""  # of the examples that it is about

    def sample(self, tokenizer: ChatTokenizer, pair: Preference, answer: list[Message]) -> Sample:
        """The chat, masked to what the assistant wrote after the prompt."""
        sample = chat_sample(tokenizer, [*pair.prompt, *answer], pair.tools)
        turns = [i for i, one in enumerate(pair.prompt) if one["role"] == "assistant"]
        said = pair.prompt[: turns[-1] + 1] if turns else []
        before = tokenizer.encode_chat(said, add_generation_prompt=False, tools=pair.tools)
        start = len(before) if turns else 0
        return replace(sample, loss_mask=[0] * start + sample.loss_mask[start:])

    def start(
        self, engine: Engine, examples: list[Example], taken: Collection[int]
    ) -> list[Example]:
        """Ask the policy, which is the reference as long as it has learnt nothing."""
        self._fingerprint = fingerprint_of(examples)
        order = sorted(taken)
        mesh, mine = engine.mesh, dict[int, list[float]]()
        for first in range(0, len(order), PAIRS_AT_ONCE):
            chosen = order[first : first + PAIRS_AT_ONCE]
            dealt = deal([longest(examples[i]) for i in chosen], mesh.layout)
            hand = dealt.hand(chosen, mesh.rank())
            logps = engine.forward_logprobs(
                self.samples([examples[i] for i in hand]), only_masked=True
            )
            sums = [float(values.double().sum()) for values in logps]
            mine |= {i: sums[2 * k : 2 * k + 2] for k, i in enumerate(hand)}
        for found in mesh.gather_json(WORLD, sorted(mine.items())):
            self._reference |= {i: sums for i, sums in found}
        return self._told(examples)

    def resume(self, examples: list[Example]) -> list[Example]:
        """Read what the reference said when the run began."""
        file = self.config.out / REFERENCE_FILE
        if not file.is_file():
            raise ValueError(
                f"{file} is missing: it holds the log-probs of the policy as the run began, which "
                "DPO compares with; put it back, or start another run"
            )
        kept = json.loads(file.read_text())
        if kept.get("pairs") != fingerprint_of(examples):
            raise ValueError(
                f"--resume: {self.config.examples_file} does not hold the pairs that the run began "
                f"with, of which {file} has the log-probs that DPO compares with; put the file "
                "back, or start another run"
            )
        self._fingerprint = kept["pairs"]
        self._reference = {int(i): sums for i, sums in kept["logps"].items()}
        return self._told(examples)

    def keep(self) -> None:
        draft = self.config.out / f".{REFERENCE_FILE}"
        kept = {"pairs": self._fingerprint, "logps": self._reference}
        write_synced(draft, json.dumps(kept) + "\n")
        os.replace(draft, self.config.out / REFERENCE_FILE)

    def _told(self, examples: list[Example]) -> list[Example]:
        """The examples with the word of the reference, those that will be drawn."""
        told = list(examples)
        for i, sums in self._reference.items():
            told[i] = tuple(
                replace(one, fields={REFERENCE: [0.0] * (len(one.tokens) - 1) + [said]})
                for one, said in zip(examples[i], sums, strict=True)
            )
        return told


class RewardModelObjective(PairObjective):
    """A score of whole chats."""

    def __init__(self, config: SftConfig) -> None:
        super().__init__(config)
        self.loss = ScoreLoss(config.label_smoothing)
        self._pad_id: int | None = None

    def read(self, tokenizer: ChatTokenizer) -> tuple[list[Example], int]:
        shape = ModelConfig.from_folder(resolve_model(self.config.model))
        classifier_class(shape.model_type)  # there is one
        self._pad_id = shape.pad_id
        return super().read(tokenizer)

    def sample(self, tokenizer: ChatTokenizer, pair: Preference, answer: list[Message]) -> Sample:
        """The chat as the reward model will read it; tools are not shown to it."""
        return rated_sample(rated_chat(tokenizer, [*pair.prompt, *answer]), self._pad_id)

    def build(self, folder: Path, config: EngineConfig, mesh: Mesh) -> Engine:
        policy = load_model(folder, device=str(mesh.device))
        return Engine(classifier_of(policy), config, mesh)

    def write(self, engine: Engine, mesh: Mesh, target: Path) -> None:
        assert isinstance(engine.model, SequenceClassifier), "`build` made it"
        if mesh.rank() == 0:
            save_sequence_classifier(engine.model, target)


def num_rows(example: Example) -> int:
    """The rows that the model reads of an example, what its samples share once."""
    rows = [read_keys(sample) for sample in example]
    return sum(added_rows([rows[i] for i in depth_first(rows)]))


def fingerprint_of(examples: Sequence[Example]) -> str:
    """A digest of all tokens, and of which of them count, in their order."""
    digest = hashlib.sha256()
    for example in examples:
        for sample in example:
            numbers = [len(sample.tokens), *sample.tokens, *sample.loss_mask]
            digest.update(array("q", numbers).tobytes())
    return digest.hexdigest()
