"""The base model of a service: engines that train it, engines that sample from it, and snapshots.

Left out: several base models in one service; start one for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from nanoengine.config import DTYPES, EngineConfig
from nanoengine.engine import Engine
from nanoengine.model.config import ModelConfig
from nanoengine.model.hf import copy_extra_files, load_model, read_state, write_folder
from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.engine import LLMEngine
from nanorl.training_service.checkpoints import Record
from nanorl.training_service.config import ServiceConfig
from nanorl.training_service.trained_model import TrainedModel


class TrainableBase:
    """A Hugging Face folder, and what the service makes of it. One thread at a time."""

    def __init__(self, config: ServiceConfig) -> None:
        """`ValueError` for a folder that cannot be read."""
        self.folder = config.model.expanduser().resolve()
        self.name = config.base_name
        self.names = {self.name, str(self.folder), str(config.model), *config.names}
        self.shape = ModelConfig.from_folder(self.folder)
        self._tokenizer = ChatTokenizer.from_folder(self.folder)
        self._dtype = DTYPES[config.dtype]
        self._infer = replace(config.infer, deterministic=True)
        self._engine_config = EngineConfig(
            dtype=config.dtype, micro_batch_tokens=config.micro_batch_tokens, deterministic=True
        )

    def make(self, record: Record) -> TrainedModel:
        """A model to train, with the weights of the base."""
        engine = Engine(load_model(self.folder), self._engine_config)
        return TrainedModel(engine, record, lambda folder: self._export(engine, folder))

    def make_sampler(self) -> LLMEngine:
        """An inference engine of a copy of its own."""
        model = load_model(self.folder, self._dtype)
        return LLMEngine(model, self._infer, tokenizer=self._tokenizer)

    def weights(self, snapshot: Path | None) -> Iterable[tuple[str, Tensor]]:
        """The tensors of a snapshot's folder; None is the base itself."""
        return read_state(self.folder if snapshot is None else snapshot)

    def _export(self, engine: Engine, folder: Path) -> None:
        write_folder(folder, self.shape, dict(engine.export_state()))
        copy_extra_files(self.folder, folder)
