"""`LLM`: a folder in, texts out, for scripts without a server. The engine itself is engine.py.

Left out: a server over several ranks (each rank must be given every request, see led_engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanoengine.adapters.lora import merge_lora
from nanoengine.formats.chosen_dtype import chosen_dtype
from nanoengine.formats.hf import load_model
from nanoengine.model.config import ModelConfig
from nanoengine.parallel.device import enter_device, resolve_device
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams

if TYPE_CHECKING:
    from nanoengine.text.chat_template import Message  # needs jinja2

Prompt = str | Sequence[int]


class LLM:
    """A model, its tokenizer and an engine. `lora` is an adapter in PEFT's format to merge. With a
    `mesh` the model is split over its tp axis, lies on its device, and every rank makes the same
    calls."""

    def __init__(
        self,
        folder: str | Path,
        config: InferConfig | None = None,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: str = "auto",
        lora: str | Path | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """`dtype` may be "auto": the folder's own. `device` is auto (CUDA if there is any), cpu,
        cuda or cuda:N."""
        place = resolve_device(device) if mesh is None else mesh.device
        enter_device(place)
        dtype = chosen_dtype(dtype, folder)
        self.tokenizer = ChatTokenizer.from_folder(folder)
        split = None
        if mesh is not None:
            split = TensorParallel.of(mesh, ModelConfig.from_folder(Path(folder)))
        if split is not None and lora is not None:
            raise ValueError(f"lora={lora}: is merged into whole matrices only; set tp=1")
        config = config or InferConfig()
        # an adapter is merged into whole matrices, which are quantised after that
        is_int8 = config.quantization == "int8" and lora is None
        model = load_model(folder, dtype, str(place), split=split, is_int8=is_int8)
        if lora is not None:
            merge_lora(model, lora)
        self.engine = LLMEngine(model, config, tokenizer=self.tokenizer)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Output]:
        """Complete texts or token ids; `params.n` outputs a prompt, their texts filled in. A text
        gets the BOS of a tokenizer that adds one. Every output is drawn by a seed of its own that
        follows from `params.seed` and its place: `[p] * 4` and `[p]` with `n=4` are the same."""
        if isinstance(prompts, str):
            raise ValueError("prompts: a single text; give a list of prompts")
        ids = [self.tokenizer.encode_prompt(p) if isinstance(p, str) else list(p) for p in prompts]
        params = replace(params, detokenize=True)
        pairs = [(one, p) for place, one in enumerate(ids) for p in params.members(place)]
        return self.engine.generate([one for one, _ in pairs], [p for _, p in pairs])

    def chat(
        self, conversations: Sequence[Sequence[Message]], params: SamplingParams
    ) -> list[Output]:
        """Answer each conversation, in the model's own chat format."""
        return self.generate(
            [
                self.tokenizer.encode_chat(messages, add_generation_prompt=True)
                for messages in conversations
            ],
            params,
        )
