"""LoRA adapters as data: which matrices, W + scale · B·A, and PEFT's folders in and out.

An adapter is a mapping from Hugging Face module names (`model.layers.0.self_attn.q_proj`) to
`LowRank`s, whatever holds those matrices here: q, k and v lie in one parameter of ours, so a module
is the rows of a parameter that `hf_views` names. Training is lora_adapter.py's, several adapters in
one batch are nanoinfer's; here one is read, written, or merged into a model's weights for good. The
product is computed in fp32 and rounded once to the model's dtype; afterwards the model is as fast
as without an adapter. Everything is checked before the first write.

Left out: DoRA, adapters of embeddings and experts, biases of adapters, saved whole modules.
Source: Hu et al. 2021, arXiv 2106.09685; rank-stabilised scale: Kalajdzievski 2023, arXiv
2312.03732; file layout and scaling of the `peft` library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nanoengine.model.hf import hf_views
from nanoengine.model.lora_config import ALL_LINEAR, LoraConfig, scale_of
from nanoengine.model.matrices import adaptable
from nanoengine.model.patterns import matches_end
from nanoengine.model.transformer import Transformer
from nanoengine.tensor_file import write_tensors

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


@dataclass(frozen=True)
class LowRank:
    """The change scale · B·A of one matrix [out, in]: `low_RI` is A, `high_OR` is B."""

    low_RI: Tensor
    high_OR: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.high_OR.shape[0], self.low_RI.shape[1]

    def added_to(self, weight: Tensor) -> Tensor:
        """weight + scale · B·A, computed in fp32 (fp64 for fp64), not yet rounded."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        low, high = (x.to(weight.device, wide) for x in (self.low_RI, self.high_OR))
        return torch.addmm(weight.to(wide), high, low, alpha=self.scale)


Adapter = Mapping[str, LowRank]
"""By the Hugging Face name of the module, without `.weight`."""


def choose_targets(model: Transformer, targets: Iterable[str]) -> list[str]:
    """The modules that `LoraConfig.targets` name, in the order of the model. `ValueError` for a
    target that names none."""
    every = list(adaptable(model))
    chosen: set[str] = set()
    for target in targets:
        found = {name for name in every if _is_meant(target, name)}
        if not found:
            kinds = sorted({name.rpartition(".")[2] for name in every})
            raise ValueError(
                f"targets: {target!r} names no matrix that can be adapted; choose from "
                f"{', '.join(kinds)}, whole names such as {every[0]}, regular expressions of them, "
                f"or {ALL_LINEAR}"
            )
        chosen |= found
    return [name for name in every if name in chosen]


def _is_meant(target: str, name: str) -> bool:
    if target == ALL_LINEAR or name == target or name.endswith(f".{target}"):
        return True
    try:
        return re.fullmatch(target, name) is not None
    except re.error as error:
        raise ValueError(f"targets: {target!r} is no regular expression: {error}") from None


def check_adapter(model: Transformer, adapter: Adapter, source: str) -> None:
    """`ValueError`, which names `source`, where an adapter is not of this model."""
    views = hf_views(model)
    for module, change in adapter.items():
        name = f"{module}.weight"
        if name not in views:
            raise ValueError(f"{source}: adapts {module}, which the model does not have")
        low, high = change.low_RI, change.high_OR
        shape = tuple(views[name].shape)
        if high.dim() != 2 or low.dim() != 2 or change.shape != shape:
            raise ValueError(
                f"{source}: {module} is {shape}, but the adapter has B {tuple(high.shape)} and A "
                f"{tuple(low.shape)}: it belongs to another model"
            )
        if high.shape[1] != low.shape[0]:
            raise ValueError(
                f"{source}: {module}: ranks {high.shape[1]} of B and {low.shape[0]} of A"
            )


def merge_lora(model: Transformer, folder: str | Path) -> None:
    """Add the adapter in `folder` to the weights of `model` and repack it. `ValueError` names what
    does not fit, and then nothing was written."""
    if model.quantization == "int8":
        raise ValueError(
            f"{folder}: an adapter is merged into whole matrices, and these are int8; merge it, "
            "then quantise"
        )
    adapter = read_adapter(folder)
    check_adapter(model, adapter, str(folder))
    views = hf_views(model)
    with torch.no_grad():
        for module, change in adapter.items():
            view = views[f"{module}.weight"]
            view.copy_(change.added_to(view))
    model.repack()


# -- PEFT's folders --------------------------------------------------------------------------------


def read_adapter(folder: str | Path) -> dict[str, LowRank]:
    """The adapter that `peft` or `write_adapter` saved, on the CPU in the dtype of the file.
    `ValueError` names a file that is missing or damaged, or an option that is not supported."""
    path = Path(folder)
    config = _read_config(path / CONFIG_FILE)
    adapter = {}
    for module, pair in _read_pairs(path / TENSOR_FILE).items():
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{path}: {module} has lora_{next(iter(pair))} alone; fetch it again")
        try:
            scale = _scale(config, module, len(pair["A"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / CONFIG_FILE}: no scale for {module}: {error}") from None
        adapter[module] = LowRank(pair["A"], pair["B"], scale)
    return adapter


def write_adapter(
    folder: str | Path, adapter: Adapter, config: LoraConfig, *, targets: list[str], base: str = ""
) -> None:
    """A folder for `peft.PeftModel.from_pretrained`, of an adapter with the rank and the scale of
    `config`. `targets` is the `target_modules` to write, `base` the name of the model below."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, change in adapter.items():
        for letter, tensor in (("A", change.low_RI), ("B", change.high_OR)):
            tensors[f"{_PREFIX}{module}.lora_{letter}.weight"] = tensor.detach().contiguous()
    write_tensors(path / TENSOR_FILE, tensors, metadata={"format": "pt"})
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": config.rslora,
        "target_modules": targets,
        **_PLAIN,
    }
    (path / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _read_config(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file} does not exist: give a folder that peft saved an adapter to")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON ({error}); fetch it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no options; fetch it again")
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type={config.get('peft_type')!r}; only LORA is supported")
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
        try:
            is_meant = matches_end(pattern, module)
        except ValueError as error:
            raise ValueError(f"alpha_pattern {pattern[:40]!r} {error}") from None
        if is_meant:
            alpha = value
            break
    return scale_of(alpha, rank, rslora=bool(config.get("use_rslora")))
