"""The base model of a service: engines that train it, engines that sample from it, and snapshots.

Adapters share one copy of the base, which is merged with one of them at a time; a model that trains
all its parameters has a copy of its own. A snapshot is PEFT's folder for the one, a Hugging Face
folder for the other. What samples from it has the very weights that were trained.

Left out: several base models in one service (start one for each); adapters of the output head,
which is frozen whatever `train_unembed` says, and of experts: of a mixture `train_mlp` reaches the
layers that are dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoengine.adapters.lora import read_adapter
from nanoengine.adapters.lora_adapter import LoraAdapter, LoraBase
from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.adapters.lora_engine import LoraEngine
from nanoengine.config import EngineConfig
from nanoengine.formats.config_json import ADAPTER_FILE
from nanoengine.formats.hf import copy_extra_files, load_model, read_state, write_folder
from nanoengine.formats.matrices import adaptable
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.optim import DTYPES
from nanoengine.state.whole_engine import Engine
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.engine import LLMEngine
from nanorl.serving.training_service.checkpoints import Record
from nanorl.serving.training_service.service_config import ServiceConfig
from nanorl.serving.training_service.trained_model import TrainedModel

ALPHA = 32.0  # the service's own choice for every rank, as Tinker's
_PARTS = {"self_attn": "train_attn", "mlp": "train_mlp"}  # of a layer, by what asks for them


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
        self._shared: LoraBase | None = None  # made with the first adapter
        self._infer = replace(config.infer, deterministic=True)
        self._engine_config = EngineConfig(
            dtype=config.dtype, micro_batch_tokens=config.micro_batch_tokens, deterministic=True
        )

    def make(self, record: Record) -> TrainedModel:
        """A model to train, which begins as the base. `ValueError` for a bad adapter."""
        if record.lora is None:
            engine = Engine(load_model(self.folder), self._engine_config)
            return TrainedModel(engine, record, lambda folder: self._export(engine, folder))
        if self._shared is None:
            self._shared = LoraBase(load_model(self.folder), self._dtype)
        targets = targets_of(self._shared.model, record.lora)
        config = LoraConfig(rank=record.lora["rank"], alpha=ALPHA, targets=targets)
        adapter = LoraAdapter(self._shared, config, seed=record.lora["seed"])
        return TrainedModel(
            LoraEngine(adapter, self._engine_config),
            record,
            lambda folder: adapter.save(folder, self.name),
        )

    def make_sampler(self) -> LLMEngine:
        """An inference engine of a copy of its own."""
        model = load_model(self.folder, self._dtype)
        return LLMEngine(model, self._infer, tokenizer=self._tokenizer)

    def weights(self, snapshot: Path | None) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a snapshot's folder; None is the base itself."""
        if snapshot is None or not (snapshot / ADAPTER_FILE).is_file():
            yield from read_state(self.folder if snapshot is None else snapshot)
            return
        adapter = read_adapter(snapshot)
        for name, tensor in read_state(self.folder):
            change = adapter.get(name.removesuffix(".weight"))
            frozen = tensor.to(self._dtype)
            yield name, frozen if change is None else change.added_to(frozen).to(self._dtype)

    def _export(self, engine: Engine, folder: Path) -> None:
        write_folder(folder, self.shape, dict(engine.export_state()))
        copy_extra_files(self.folder, folder)


def targets_of(model: Transformer, lora: Mapping[str, Any]) -> tuple[str, ...]:
    """The matrices that the client asks to adapt, by the names that they have in this model: some
    families fuse q, k and v, or gate and up. `ValueError` where there are none."""
    wanted = [part for part, switch in _PARTS.items() if lora[switch]]
    if not wanted:
        raise ValueError("lora_config: train_attn and train_mlp are both off; nothing would learn")
    names = [name.split(".", 3)[3] for name in adaptable(model)]  # behind model.layers.N.
    targets = dict.fromkeys(name for name in names if name.partition(".")[0] in wanted)
    if not targets:
        raise ValueError(
            "lora_config: train_attn is off, and the MLP of this model is a mixture of experts, "
            "which adapters do not reach; set train_attn"
        )
    return tuple(targets)
