"""LoRA adapters in PEFT's format, merged into a model's weights: W + scale · B·A, once, at load.

The product is computed in fp32 and rounded once to the model's dtype; afterwards the model is as
fast as without an adapter. Everything is checked before the first write.
Left out: serving several adapters at a time, DoRA, adapters of embeddings, saved whole modules.
Source: Hu et al. 2021; file layout and scaling of the `peft` library.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nanoengine.model.hf import hf_views
from nanoengine.model.transformer import Transformer

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_([AB])\.weight")
# Options that change the arithmetic, with the one value that is supported.
_PLAIN: dict[str, Any] = {
    "use_dora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
    "lora_bias": False,
}


def merge_lora(model: Transformer, folder: str | Path) -> None:
    """Add the adapter in `folder` to the weights of `model` and repack it. `ValueError` names what
    does not fit, and then nothing was written."""
    path = Path(folder)
    config = _read_config(path / CONFIG_FILE)
    pairs = _read_pairs(path / TENSOR_FILE)
    views = hf_views(model)
    changes = []
    for module, pair in pairs.items():
        name = f"{module}.weight"
        if name not in views:
            raise ValueError(f"{path}: adapts {module}, which the model does not have")
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{path}: {module} has lora_{next(iter(pair))} alone; fetch it again")
        low, high = pair["A"].float(), pair["B"].float()
        shape = tuple(views[name].shape)
        if high.dim() != 2 or low.dim() != 2 or (high.shape[0], low.shape[1]) != shape:
            raise ValueError(
                f"{path}: {module} is {shape}, but the adapter has B {tuple(high.shape)} and A "
                f"{tuple(low.shape)}: it belongs to another model"
            )
        if high.shape[1] != low.shape[0]:
            raise ValueError(
                f"{path}: {module}: ranks {high.shape[1]} of B and {low.shape[0]} of A"
            )
        scale = _scale(config, module, rank=low.shape[0])
        changes.append((views[name], scale * (high @ low)))
    with torch.no_grad():
        for view, delta in changes:
            view.copy_(view.float() + delta.to(view.device))
    model.repack()


def _read_config(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file} does not exist: give a folder that peft saved an adapter to")
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type={config.get('peft_type')!r}; only LORA can be merged")
    for name, plain in _PLAIN.items():
        if config.get(name, plain) not in (plain, [] if plain is None else plain):
            raise ValueError(f"{file}: {name}={config[name]!r} is not supported; only {plain!r}")
    return config


def _read_pairs(file: Path) -> dict[str, dict[str, Tensor]]:
    """{module: {"A": [rank, in], "B": [out, rank]}}."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist (pickled adapters are not read: save it again)")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file ({error}); fetch it again") from error
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise ValueError(f"{file}: tensor {name!r} is not a lora_A or lora_B of a linear layer")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    return pairs


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
            break
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
