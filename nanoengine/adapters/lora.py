"""LoRA adapters as data: which matrices, W + scale · B·A, and PEFT's folders in and out.

An adapter is a mapping from module names (`model.layers.0.self_attn.q_proj`, as in `hf_views`; in
folders of models that see `model.language_model.layers.0...`) to `LowRank`s, whatever holds those
matrices here: q, k and v lie in one parameter of ours, so a module is the rows of a parameter that
`hf_views` names. Training is lora_adapter.py's, several adapters in one batch are nanoinfer's; here
one is read, written, or merged into a model's weights for good. The product is computed in fp32 and
rounded once to the model's dtype; afterwards the model is as fast as without an adapter. Everything
is checked before the first write.

Left out: DoRA, adapters of embeddings and experts, biases of adapters, saved whole modules.
Source: Hu et al. 2021, arXiv 2106.09685; rank-stabilised scale: Kalajdzievski 2023, arXiv
2312.03732; file layout and scaling of the `peft` library.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kernels.memory import all_finite
from nanoengine.adapters.lora_config import ALL_LINEAR, LoraConfig
from nanoengine.adapters.peft_config import HEAD, PLAIN, PeftConfig, read_peft_config
from nanoengine.formats.config_json import ADAPTER_FILE
from nanoengine.formats.hf import hf_views, name_here, name_in_folder
from nanoengine.formats.matrices import adaptable
from nanoengine.model.transformer import Transformer
from nanoengine.state.tensor_file import write_tensors

TENSOR_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_([AB])\.weight")
_WRITTEN = ("use_dora", "fan_in_fan_out", "bias", "modules_to_save", "lora_bias")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LowRank:
    """The change scale · B·A of one matrix [out, in]: `low_RI` is A, `high_OR` is B."""

    low_RI: Tensor
    high_OR: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix that this changes."""
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
            _check_tower(model, target)
            kinds = sorted({name.rpartition(".")[2] for name in every})
            raise ValueError(
                f"targets: {target!r} names no matrix that can be adapted; choose from "
                f"{', '.join(kinds)}, whole names such as {every[0]}, regular expressions of them, "
                f"or {ALL_LINEAR}"
            )
        chosen |= found
    return [name for name in every if name in chosen]


def _check_tower(model: Transformer, target: str) -> None:
    """`ValueError` for a target that is of a vision tower."""
    if not hasattr(model, "visual"):
        return
    names = [name.rpartition(".")[0] for name in hf_views(model) if ".visual." in name]
    if target == "visual" or any(_is_meant(target, name) for name in names):
        raise ValueError(
            f"targets: {target!r} is of the vision tower, which an adapter leaves as it is: its "
            "features would differ by request; name matrices of the decoder, or train all weights"
        )


def _is_meant(target: str, name: str) -> bool:
    if target == ALL_LINEAR or name == target or name.endswith(f".{target}"):
        return True
    try:
        return re.fullmatch(target, name) is not None
    except re.error as error:
        raise ValueError(f"targets: {target!r} is no regular expression: {error}") from None


def check_adapter(model: Transformer, adapter: Adapter, source: str) -> None:
    """`ValueError`, which names `source`, where an adapter is not of this model, or changes
    nothing, or holds what is no number."""
    if not adapter:
        raise ValueError(f"{source}: adapts no module, so it would change nothing; fetch it again")
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
    tensors = [x for change in adapter.values() for x in (change.low_RI, change.high_OR)]
    names = [f"{module}.lora_{letter}" for module in adapter for letter in "AB"]
    for name, is_finite in zip(names, all_finite(tensors), strict=True):
        if not is_finite:
            raise ValueError(f"{source}: {name} holds NaN or infinity; fetch it again")
    for module, change in adapter.items():
        if not math.isfinite(change.scale):
            raise ValueError(f"{source}: {module} has scale {change.scale}; must be finite")


def merge_lora(model: Transformer, folder: str | Path) -> None:
    """Add the adapter in `folder` to the weights of `model` and repack it. `ValueError` names what
    does not fit, and then nothing was written."""
    if model.quantization == "int8":
        raise ValueError(
            f"{folder}: an adapter is merged into whole matrices, and these are int8; merge it, "
            "then quantise"
        )
    adapter = adapter_of(model, folder, str(folder))
    views = hf_views(model)
    with torch.no_grad():
        for module, change in adapter.items():
            view = views[f"{module}.weight"]
            view.copy_(change.added_to(view))
    model.repack()


# -- PEFT's folders --------------------------------------------------------------------------------


def read_adapter(folder: str | Path) -> dict[str, LowRank]:
    """The adapter that `peft` or `write_adapter` saved, on the CPU in the dtype of the file.
    `ValueError` names a file that is missing or damaged, an option that is not supported, or what
    options and tensors say differently."""
    return _read_folder(Path(folder))[1]


def _read_folder(path: Path) -> tuple[PeftConfig, dict[str, LowRank]]:
    config = read_peft_config(path / ADAPTER_FILE)
    pairs = _read_pairs(path / TENSOR_FILE)
    adapter = {}
    for module, pair in pairs.items():
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{path}: {module} has lora_{next(iter(pair))} alone; fetch it again")
        try:
            rank, scale = config.rank_of(module), config.scale_of(module)
        except ValueError as error:
            raise ValueError(f"{path / ADAPTER_FILE}: no scale for {module}: {error}") from None
        found = {len(pair["A"]), *pair["B"].shape[1:]}
        if len(found) == 1 and found != {rank}:
            raise ValueError(
                f"{path / ADAPTER_FILE}: r says that {module} has rank {rank}, and its tensors "
                f"have {found.pop()}, so the scale is not known; mend r or rank_pattern"
            )
        adapter[module] = LowRank(pair["A"], pair["B"], scale)
    try:
        config.check_modules(adapter)
    except ValueError as error:
        raise ValueError(f"{path / ADAPTER_FILE}: {error}") from None
    return config, adapter


def adapter_of(model: Transformer, source: str | Path | Adapter, name: str) -> Adapter:
    """The adapter that `source` is, or its folder has, which is one of this model and whole.
    `ValueError` names what does not fit (by `name`, where there is no folder), and what the options
    of a folder name and its tensors lack."""
    if not isinstance(source, (str, Path)):
        check_adapter(model, source, name)
        return source
    path = Path(source)
    config, read = _read_folder(path)
    adapter = {name_here(module): change for module, change in read.items()}
    check_adapter(model, adapter, str(path))
    every = [name_in_folder(module, model.config) for module in adaptable(model)]
    try:
        config.check_complete(read, [*every, *([HEAD] if model.head is not None else [])])
    except ValueError as error:
        raise ValueError(f"{path / ADAPTER_FILE}: {error}") from None
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
        **{name: PLAIN[name] for name in _WRITTEN},  # what old releases know, too
    }
    (path / ADAPTER_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


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
        if tensor.dtype not in _DTYPES or tensor.dim() != 2:
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            raise ValueError(f"{file}: tensor {name!r} is {kind}; must be a matrix of floats")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    return pairs
