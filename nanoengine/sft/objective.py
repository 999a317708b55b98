"""What a supervised run learns from: how a line becomes samples, their loss, and what is written.

An example is what is drawn as a whole: the one sample of a chat, or the two of a pair of answers.
`SftObjective` is of chats; pair_objectives.py has the others.
Next: sft_run.py, which asks an objective at each stage of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoengine.build import build_engine
from nanoengine.config import EngineConfig
from nanoengine.engine import LossFn, WeightFn
from nanoengine.formats.families import sees
from nanoengine.model.config import ModelConfig
from nanoengine.packing import Sample
from nanoengine.parallel.mesh import Mesh
from nanoengine.sft.chats import num_loss_tokens, read_chats, sft_loss
from nanoengine.sft.sft_config import SftConfig
from nanoengine.state.export import export_hf
from nanoengine.state.whole_engine import Engine
from nanoengine.text.tokenizer import ChatTokenizer

Example = tuple[Sample, ...]


class Objective(ABC):
    """One of a run, made of its options."""

    unit: str
    """What an example is called, several of them."""
    loss: LossFn
    weight: WeightFn
    written: tuple[str, ...] = ()
    """The files that it writes beside those of every run."""

    def __init__(self, config: SftConfig) -> None:
        self.config = config

    def tokenizer(self, folder: Path) -> ChatTokenizer:
        """The tokenizer of the model's folder."""
        return ChatTokenizer.from_folder(folder)

    @abstractmethod
    def read(self, tokenizer: ChatTokenizer) -> tuple[list[Example], int]:
        """(examples, number of those that are too long). `ValueError` names what is wrong."""

    def engine_config(self, examples: Sequence[Example]) -> EngineConfig:
        """The options of the engine; without examples, before they are read."""
        return self.config.engine_config

    def build(self, folder: Path, config: EngineConfig, mesh: Mesh) -> Engine:
        """The engine, with the weights of `folder`."""
        return build_engine(folder, config, mesh, self.config)

    def start(
        self, engine: Engine, examples: list[Example], taken: Collection[int]
    ) -> list[Example]:
        """The examples with what the model says of them before it learns, which all processes ask
        it; `taken` are those that the run will draw."""
        return examples

    def resume(self, examples: list[Example]) -> list[Example]:
        """The same of a run that goes on."""
        return examples

    def keep(self) -> None:
        """Write what `resume` reads, if anything; the first process calls it."""
        return

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        """The samples of a batch, or of a process's part of it."""
        return [sample for example in examples for sample in example]

    def row(self, result: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics, of what the engine says of it."""
        return dict(result)

    def describe(self, row: Mapping[str, Any]) -> str:
        """The text of the progress bar for a step, beside its loss; a blank ends it."""
        return ""

    def write(self, engine: Engine, mesh: Mesh, target: Path) -> None:
        """Write the trained model as a Hugging Face folder; all processes call it."""
        export_hf(mesh if mesh.size() > 1 else None, engine.models, target)


class SftObjective(Objective):
    """Cross-entropy on what the assistant wrote. A model that sees keeps the pictures of its chats
    in the run's folder, under pictures/."""

    unit = "chats"
    loss = sft_loss
    weight = staticmethod(num_loss_tokens)

    def __init__(self, config: SftConfig) -> None:
        super().__init__(config)
        self._pictures: Any = None  # the store, of a model that sees

    def tokenizer(self, folder: Path) -> ChatTokenizer:
        """One that keeps the pictures of chats, for a model that sees."""
        if not sees(ModelConfig.from_folder(folder).model_type):
            return super().tokenizer(folder)
        from nanoengine.vision.seeing_tokenizer import seeing_tokenizer  # here: few models see

        tokenizer = seeing_tokenizer(folder, self.config.out / "pictures")
        self._pictures = tokenizer.store
        return tokenizer

    def read(self, tokenizer: ChatTokenizer) -> tuple[list[Example], int]:
        samples, num_long = read_chats(self.config.examples_file, tokenizer, self.config.max_tokens)
        return [(sample,) for sample in samples], num_long

    def build(self, folder: Path, config: EngineConfig, mesh: Mesh) -> Engine:
        engine = super().build(folder, config, mesh)
        if self._pictures is not None:
            from nanoengine.vision.sight import Sight  # here: few models see

            models: list[Any] = engine.models
            for model in models:
                model.sight = Sight(model, self._pictures)
        return engine


def longest(example: Example) -> Sample:
    """The sample by which an example is dealt out to processes."""
    return max(example, key=lambda sample: len(sample.tokens))
