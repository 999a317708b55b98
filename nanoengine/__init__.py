"""nanoengine: the model, how it is split over processes and how it is trained.

    from nanoengine import Engine, EngineConfig, Sample, load_model, num_loss_tokens, sft_loss

    engine = Engine(load_model("path/to/a/hugging-face-folder"), EngineConfig(lr=1e-5))
    samples = [Sample(tokens=[1, 5, 7, 9], loss_mask=[0, 0, 1, 1])]
    print(engine.train_step(samples, sft_loss, num_loss_tokens))   # {"loss": ..., "grad_norm": ...}

Read `engine.py` first, then `model/transformer.py`. Names are imported when they are first used,
so that a program which only asks for one small module does not wait for PyTorch. The rooms:
model/ text/               the dense model; tokenizers and chat templates
parallel/                  the model and its training, split over processes
state/ formats/            checkpoints and the folder of a run; how models lie on disks
architectures/ adapters/   other families, mixtures of experts; LoRA
heads/ sft/ plan/          values, classes, likeliest tokens; supervised tuning; costs on paper
"""

# ruff: noqa: F401 (these imports are for type checkers; at run time `_HOMES` says where)
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanoengine.our_kernels import require_our_kernels

if TYPE_CHECKING:
    from nanoengine.adapters.lora_adapter import LoraAdapter, LoraBase
    from nanoengine.adapters.lora_config import LoraConfig
    from nanoengine.adapters.lora_engine import LoraEngine
    from nanoengine.build import build_engine, build_value_engine, check_layout
    from nanoengine.config import AdamWConfig, EngineConfig
    from nanoengine.formats.hf import load_model, save_model
    from nanoengine.heads.scorer import Policy, Scorer
    from nanoengine.heads.value_engine import ValueEngine, ValueModel
    from nanoengine.model.config import ModelConfig
    from nanoengine.model.transformer import Transformer
    from nanoengine.packing import MicroBatch, Sample
    from nanoengine.parallel.layout import Layout, SplitConfig
    from nanoengine.parallel.mesh import Mesh
    from nanoengine.parallel.pipeline_engine import PipelineEngine
    from nanoengine.sft.chats import num_loss_tokens, read_chats, sft_loss
    from nanoengine.state.kept_adamw import AdamW
    from nanoengine.state.tensor_file import CheckpointError
    from nanoengine.state.whole_engine import Engine
    from nanoengine.text.tokenizer import ChatTokenizer

require_our_kernels()

# Threads of PyTorch's own operations spin for milliseconds after each of them, and so keep those of
# the C++ kernels (kernels/cpp/parallel.h) off the cores: a step of 800 tokens on two took 40 %
# longer. OpenMP reads this once, when torch is loaded. What a user has set stays.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_HOMES = {
    "AdamW": "state.kept_adamw",
    "AdamWConfig": "config",
    "ChatTokenizer": "text.tokenizer",
    "CheckpointError": "state.tensor_file",
    "Engine": "state.whole_engine",
    "EngineConfig": "config",
    "Layout": "parallel.layout",
    "LoraAdapter": "adapters.lora_adapter",
    "LoraBase": "adapters.lora_adapter",
    "LoraConfig": "adapters.lora_config",
    "LoraEngine": "adapters.lora_engine",
    "Mesh": "parallel.mesh",
    "MicroBatch": "packing",
    "ModelConfig": "model.config",
    "PipelineEngine": "parallel.pipeline_engine",
    "Policy": "heads.scorer",
    "Sample": "packing",
    "Scorer": "heads.scorer",
    "SplitConfig": "parallel.layout",
    "Transformer": "model.transformer",
    "ValueEngine": "heads.value_engine",
    "ValueModel": "heads.value_engine",
    "build_engine": "build",
    "build_value_engine": "build",
    "check_layout": "build",
    "load_model": "formats.hf",
    "num_loss_tokens": "sft.chats",
    "read_chats": "sft.chats",
    "save_model": "formats.hf",
    "sft_loss": "sft.chats",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nanoengine' has no attribute {name!r}")
    return getattr(import_module(f"nanoengine.{_HOMES[name]}"), name)
