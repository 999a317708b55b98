"""Hugging Face folders: safetensors in and out, one file or shards with an index.

A Hugging Face tensor is a row slice of one of our parameters (q, k and v lie in one matrix, gate
and up in another) or, in families that fuse them too, all of it, so `hf_views` names the slices and
every other function here copies through those views. Loading is strict and checks all names and
shapes before the first write: a refused load leaves the model as it was.
Left out: pickle files (`pytorch_model.bin` runs code when read), quantised tensors but for MXFP4
(mxfp4.py).
Next: sources.py (where folders come from), gguf.py (folders made from a llama.cpp file).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.memory import all_finite
from kernels.transport.checksum import copy_large
from nanoengine.architectures.family_layer import FamilyLayer
from nanoengine.architectures.moe import ExpertSplit, MoeMlp
from nanoengine.architectures.quantized import Int8Linear, check_quantizable, quantize_layer
from nanoengine.formats.config_json import ADAPTER_FILE, context_limit
from nanoengine.formats.families import ModelFamily, family_of, sees
from nanoengine.formats.matrices import int8_places
from nanoengine.formats.mxfp4 import widened
from nanoengine.formats.template_files import template_files
from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import DecoderLayer
from nanoengine.model.linear import TensorSplit
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.parameter_record import Slice, side_by_side
from nanoengine.plan.footprint import num_params, weight_bytes
from nanoengine.state.tensor_file import dtype_name, write_tensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_TIED_HEAD = "lm_head.weight"
_TOWERS = ("model.visual.", "model.vision_model.", "model.connector.")
_SPELLINGS = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "visual.": "model.visual.",
}
_TOWER_VIEWS = "nanoengine.vision.tower_names:tower_views"
_SEEING = "nanoengine.vision.seeing_transformer:SeeingTransformer"
_COLUMN_SPLIT = tuple(
    f"{name}_proj.{kind}" for name in ("q", "k", "v", "gate", "up") for kind in ("weight", "bias")
)
_ROW_SPLIT = ("o_proj.weight", "down_proj.weight")
_STACK_SPLIT = {  # the dimension
    "self_attn.sinks": 0,
    "experts.gate_up_proj": 2,
    "experts.gate_up_proj_bias": 1,
    "experts.down_proj": 1,
}
_HALVES_SPLIT = {  # the dimension of [experts, out, in], and the matrices that lie along it
    "experts.gate_up_proj": (1, 2),
    "experts.down_proj": (2, 1),
}
_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
_EXTRA_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)


def hf_views(model: Transformer) -> dict[str, Tensor]:
    """Every Hugging Face name with the view of our parameter that holds it; writing to the view
    writes to the model (then call `repack`). A tied head appears once, as the embedding. A model
    that sees has the names of a text model, and its tower's behind them (`name_in_folder`). A
    pipeline stage has the names it holds. The view of an int8 matrix has a shape and no numbers
    (meta): `export_state` and `load_state` know what to do."""
    views = _text_views(model)
    tower = getattr(model, "visual", None)  # of stages the first has it
    if tower is not None:
        views |= resolve_name(_TOWER_VIEWS)(tower)
    return views


def _text_views(model: Transformer) -> dict[str, Tensor]:
    """The views of the decoder."""
    views = {}
    if model.embedding is not None:
        views["model.embed_tokens.weight"] = model.embedding.detach()
    for layer in model.layers:
        if isinstance(layer, DecoderLayer):  # others are on another pipeline stage
            views |= _layer_views(layer, family_of(model.config.model_type))
    if model.norm is not None:
        views["model.norm.weight"] = model.norm.detach()
    if model.head is not None:
        views[_TIED_HEAD] = model.head.detach()
    return views


def model_class(config: ModelConfig) -> type[Transformer]:
    """The class of a model in one piece: one that sees has a tower beside its layers."""
    if not sees(config.model_type):
        return Transformer
    found: type[Transformer] = resolve_name(_SEEING)
    return found


def name_here(name: str) -> str:
    """A name in a folder, in either spelling that there is of models that see, as `hf_views` has
    it."""
    for theirs, ours in _SPELLINGS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def name_in_folder(name: str, config: ModelConfig) -> str:
    """A name of `hf_views` as transformers 5 writes it."""
    prefix = family_of(config.model_type).prefix
    if not name.startswith("model."):
        return name
    if name.startswith(_TOWERS):
        return name.removeprefix("model.") if prefix == "model." else name
    return prefix + name.removeprefix("model.")


def _layer_views(layer: DecoderLayer, family: ModelFamily) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer.index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    rows: tuple[int, ...] = (layer.q_width, layer.kv_width, layer.kv_width)
    qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
    if family.fused_qkv:
        rows, qkv = (sum(rows),), (f"{attention}.qkv_proj",)
    views = _norm_views(layer, family, prefix, "input_norm")
    parts = layer.qkv.weight.detach().split(rows)
    views |= {f"{name}.weight": part for name, part in zip(qkv, parts, strict=True)}
    if layer.qkv.bias is not None:
        parts = layer.qkv.bias.detach().split(rows)
        views |= {f"{name}.bias": part for name, part in zip(qkv, parts, strict=True)}
    if layer.q_norm is not None and layer.k_norm is not None:
        views[f"{attention}.q_norm.weight"] = layer.q_norm.detach()
        views[f"{attention}.k_norm.weight"] = layer.k_norm.detach()
    if layer.sinks is not None:
        views[f"{attention}.sinks"] = layer.sinks.detach()
    views[f"{attention}.o_proj.weight"] = layer.out.weight.detach()
    if layer.out.bias is not None:
        views[f"{attention}.o_proj.bias"] = layer.out.bias.detach()
    views |= _norm_views(layer, family, prefix, "attention_norm", "post_norm", "mlp_norm")
    if isinstance(layer, FamilyLayer) and layer.moe is not None:
        return views | _expert_views(mlp, layer.moe, family)
    gate_up, down = layer.gate_up.weight.detach(), layer.down.weight.detach()
    if family.fused_gate_up:
        return views | {f"{mlp}.gate_up_proj.weight": gate_up, f"{mlp}.down_proj.weight": down}
    return views | _mlp_views(mlp, gate_up, down)


def _norm_views(
    layer: DecoderLayer, family: ModelFamily, prefix: str, *names: str
) -> dict[str, Tensor]:
    """Those of a layer's norms that its family has."""
    theirs = family.norms
    return {
        f"{prefix}.{theirs[name]}.weight": getattr(layer, name).detach()
        for name in names
        if name in theirs
    }


def _mlp_views(mlp: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    gate, up = gate_up.chunk(2)
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"{mlp}.{n}.weight": w for n, w in zip(names, (gate, up, down), strict=True)}


def _expert_views(mlp: str, moe: MoeMlp, family: ModelFamily) -> dict[str, Tensor]:
    if moe.is_stacked:
        return _stacked_views(mlp, moe)
    views = {f"{mlp}.gate.weight": moe.router.weight.detach()}
    stacks = (moe.gate_up.weight.detach(), moe.down.weight.detach())
    if family.experts == "halves":
        names = (f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj")
        return views | dict(zip(names, stacks, strict=True))
    for index, gate_up, down in zip(moe.held, *stacks, strict=True):
        views |= _mlp_views(f"{mlp}.experts.{index}", gate_up, down)
    return views


def _stacked_views(mlp: str, moe: MoeMlp) -> dict[str, Tensor]:
    """Views of experts that share tensors [X, in, out] in the file; ours are [X, out, in]."""
    views = {f"{mlp}.router.weight": moe.router.weight.detach()}
    if moe.router.bias is not None:
        views[f"{mlp}.router.bias"] = moe.router.bias.detach()
    for name, stack in (("gate_up_proj", moe.gate_up), ("down_proj", moe.down)):
        views[f"{mlp}.experts.{name}"] = stack.weight.detach().transpose(1, 2)
        if stack.bias is not None:
            views[f"{mlp}.experts.{name}_bias"] = stack.bias.detach()
    return views


def hf_slices(model: Transformer) -> dict[str, Slice]:
    """The place of each view of a split model in the whole tensor, over the ranks that split heads
    or, of stacked experts, over those that share the experts; names that every rank holds whole are
    absent, so a model that is not split has none, and a vision tower none at all."""
    split, config = model.split, model.config
    family = family_of(config.model_type)
    is_wide = family.qk_norm == "width"
    if model.experts is not None:
        held = model.experts.held
        part = Slice(0, config.num_experts, ((held.start, held.stop),))
        return {name: part for name in hf_views(model) if is_expert_stack(name)}
    if split.size == 1:
        return {}
    found = {}
    q, kv = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    fused = {
        "qkv_proj.weight": (q, kv, kv),
        "gate_up_proj.weight": (config.intermediate_size, config.intermediate_size),
    }
    for name, view in _text_views(model).items():
        kind = ".".join(name.split(".")[-2:])
        if name in ("model.embed_tokens.weight", _TIED_HEAD):
            found[name] = Slice(0, config.vocab_size, (split.run(config.vocab_size),))
        elif kind in fused:
            found[name] = side_by_side(0, fused[kind], split)
        elif kind in _COLUMN_SPLIT or (kind in _HEAD_NORMS and is_wide):
            found[name] = side_by_side(0, (split.size * view.shape[0],), split)
        elif kind in _HALVES_SPLIT and family.experts == "halves":
            dim, num_halves = _HALVES_SPLIT[kind]
            found[name] = side_by_side(dim, (config.moe_intermediate_size,) * num_halves, split)
        elif kind in _STACK_SPLIT:
            dim = _STACK_SPLIT[kind]
            found[name] = side_by_side(dim, (split.size * view.shape[dim],), split)
        elif kind in _ROW_SPLIT:
            found[name] = side_by_side(1, (split.size * view.shape[1],), split)
    return found


def is_expert(name: str) -> bool:
    """Say whether a Hugging Face tensor is one expert's, which not every ep rank holds."""
    return ".mlp.experts." in name


def is_expert_stack(name: str) -> bool:
    """Say whether a Hugging Face tensor holds a matrix or bias of all experts."""
    return is_expert(name) and not re.search(r"\.experts\.\d+\.", name)


def renumber_expert(name: str, by: int) -> str:
    """The same matrix of another expert."""
    return re.sub(r"(\.experts\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + by}", name)


def gather_expert(name: str, view: Tensor, experts: ExpertSplit) -> Iterator[tuple[str, Tensor]]:
    """The matrix of an expert of this rank, and those at its place on the other ranks; of a tensor
    of all experts the whole."""
    if is_expert_stack(name):
        yield name, torch.cat(experts.gather(view))
        return
    for rank, tensor in enumerate(experts.gather(view)):
        yield renumber_expert(name, rank * len(experts.held) - experts.held.start), tensor


def export_state(
    model: Transformer, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Each Hugging Face tensor once, as a view where `dtype` is the model's own (the default):
    read it before the weights change. An int8 matrix as what it stands for, a fresh tensor."""
    places = {name: (place, matrix) for name, place, matrix in int8_places(model)}
    last: tuple[Int8Linear, Tensor] | None = None
    for name, view in hf_views(model).items():
        if name in places:
            place, matrix = places[name]
            if last is None or last[0] is not matrix:  # q, k and v lie in one
                last = matrix, matrix.dequantized()
            view = last[1][place.lo : place.hi].to(view.dtype)
        yield name, view if dtype is None else view.to(dtype)


def held_state(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The tensors from which `export_state` takes its values, without a copy: the same views, and
    of int8 matrices, which are finite, the changes."""
    for name, view in hf_views(model).items():
        if not view.is_meta:
            yield name, view
    for name, _, matrix in int8_places(model):
        if matrix.change is not None:
            yield from ((name, tensor) for tensor in matrix.change.tensors())


def load_state(
    model: Transformer,
    state: Iterable[tuple[str, Tensor]],
    *,
    packs: bool = True,
    is_finite: bool = False,
) -> None:
    """Write Hugging Face tensors into the model and repack it (unless the caller does, `packs`).

    `ValueError` names missing, unknown, repeated and wrong-shaped tensors and those that hold NaN
    or infinity, and then nothing was written. A tied model may also be given `lm_head.weight`, if
    it equals the embedding. A split model takes its part of the whole tensors. With `is_finite` the
    caller has looked at the values, which are not read once more.
    """
    views, slices = hf_views(model), hf_slices(model)
    tensors = _collect(state)
    if model.head is None:
        drop_tied_head(tensors)
    if model.experts is not None:
        _drop_experts_elsewhere(model, views, tensors)
    if family_of(model.config.model_type).experts == "halves":
        _turn_experts(views, slices, tensors)
    for name, part in slices.items():
        if name in tensors and tensors[name].shape == part.whole_shape(views[name].shape):
            tensors[name] = part.take(tensors[name])
    check_state(views, tensors)
    if not is_finite:
        check_finite(tensors.items(), "nothing was loaded; fetch the model again")
    plain = {name: view for name, view in views.items() if not view.is_meta}
    copy_large(list(plain.values()), [tensors[name] for name in plain])
    parts: dict[Int8Linear, list[Tensor]] = {}
    for name, _, matrix in int8_places(model):
        parts.setdefault(matrix, []).append(tensors[name])
    for matrix, theirs in parts.items():
        matrix.write(torch.cat([part.to(matrix.weight.dtype) for part in theirs]))
    if packs:
        model.repack()


def load_stages(stages: Sequence[Transformer], state: Iterable[tuple[str, Tensor]]) -> None:
    """`load_state` into parts of a model that each hold some of its layers: `state` has the
    tensors of the whole model, of which other ranks' stages take the rest."""
    config = stages[0].config
    tensors = _collect(state)
    if config.tie_word_embeddings:
        drop_tied_head(tensors)
    check_state(hf_views(model_class(config)(config, device="meta")), tensors)
    mine = [(stage, {name: tensors[name] for name in hf_views(stage)}) for stage in stages]
    for _, part in mine:  # before any stage is written
        check_finite(part.items(), "nothing was loaded; fetch the model again")
    for stage, part in mine:
        load_state(stage, part.items(), is_finite=True)


def _drop_experts_elsewhere(
    model: Transformer, views: dict[str, Tensor], tensors: dict[str, Tensor]
) -> None:
    """Leave the experts of this rank, and those that the model does not have, to be refused."""
    assert model.experts is not None, "all experts are here"
    foreign = [name for name in tensors if is_expert(name) and name not in views]
    for name in [name for name in foreign if not is_expert_stack(name)]:
        number = int(name.split(".experts.")[1].split(".")[0])
        sibling = renumber_expert(name, model.experts.held.start - number)
        if sibling in views and number < model.config.num_experts:
            del tensors[name]


def _turn_experts(
    views: dict[str, Tensor], slices: dict[str, Slice], tensors: dict[str, Tensor]
) -> None:
    """Published folders have [experts, in, out], those of transformers 5 [experts, out, in], as the
    views. The shape tells: no such matrix is square (config_json.py)."""
    for name in [name for name in tensors if is_expert_stack(name) and name in views]:
        turned, shape = tensors[name].mT, views[name].shape
        if turned.shape == (slices[name].whole_shape(shape) if name in slices else shape):
            tensors[name] = turned


def _collect(state: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in state:
        if name in tensors:
            raise ValueError(f"tensor {name!r} came twice; nothing was loaded")
        if not name.endswith("rotary_emb.inv_freq"):  # old exports carry the rope table
            tensors[name] = tensor
    return tensors


def drop_tied_head(tensors: dict[str, Tensor]) -> None:
    head = tensors.pop(_TIED_HEAD, None)
    embedding = tensors.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ValueError(
            f"{_TIED_HEAD} differs from model.embed_tokens.weight, but config.json says "
            "tie_word_embeddings=true; nothing was loaded. Set it to false to keep both"
        )


def check_finite(state: Iterable[tuple[str, Tensor]], outcome: str) -> None:
    """`ValueError` names a tensor that holds NaN or infinity. Without this a model would go on
    computing NaN without an error."""
    state = list(state)
    for (name, _), is_finite in zip(state, all_finite([x for _, x in state]), strict=True):
        if not is_finite:
            raise ValueError(f"tensor {name!r} holds NaN or infinity; {outcome}")


def check_held(model: Transformer, outcome: str) -> None:
    """`check_finite` of a model's own values."""
    check_finite(held_state(model), outcome)


def check_state(views: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Refuse tensors whose names or shapes are not those of `hf_views`."""
    problems = []
    missing = [name for name in views if name not in tensors]
    extra = [name for name in tensors if name not in views]
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, must be {tuple(view.shape)}"
        for name, view in views.items()
        if name in tensors and tensors[name].shape != view.shape
    ]
    for label, names in (("missing", missing), ("unknown", extra), ("wrong shape", wrong)):
        if names:
            rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
            problems.append(f"{label}: {', '.join(names[:4])}{rest}")
    if problems:
        raise ValueError(
            f"the tensors do not fit the model ({'; '.join(problems)}); nothing was loaded. Check "
            "that config.json and the tensors belong to the same model"
        )


def load_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    head_dtype: torch.dtype | None = None,
    split: TensorSplit | None = None,
    packs: bool = True,
    is_int8: bool = False,
) -> Transformer:
    """Read config.json and the tensors of a Hugging Face folder; with `split`, this rank's part of
    them. `packs` False leaves the prepacked copies to the trainer that the model is for: in the
    dtype of the folder they would double what loading takes. `is_int8` quantises layer by
    layer (architectures/quantized.py): no two of them are in memory in another format. `ValueError`
    names the file that is missing or damaged and what to do."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: give a Hugging Face model folder")
    config = ModelConfig.from_folder(path)
    say_difference(path, config)
    check_memory(config, dtype, device, num_parts=1 if split is None else split.size)
    state = read_state(path)
    finish = None
    if is_int8:
        is_split = split is not None and split.size > 1
        check_quantizable("int8", torch.device(device), is_split=is_split)
        finish = partial(quantize_layer, kind="int8")
    model = model_class(config)(
        config, dtype, device, head_dtype=head_dtype, split=split, finish_layer=finish
    )
    try:
        load_state(model, state, packs=packs)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return model


def say_difference(folder: Path, config: ModelConfig) -> None:
    """Warn once where a folder is served otherwise by others: its context ends later, or an
    adapter beside its weights is added to them."""
    limit = context_limit(config)
    if limit is not None:
        warnings.warn(f"{folder / 'config.json'}: {limit}", stacklevel=3)
    if (folder / ADAPTER_FILE).is_file():
        warnings.warn(
            f"{folder / ADAPTER_FILE} lies beside the weights of a model: they are loaded without "
            "the adapter; put it into a folder of its own",
            stacklevel=3,
        )


def check_memory(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, *, num_parts: int = 1
) -> None:
    """`ValueError` where the weights alone, or one of their equal parts, are more than the whole
    memory of the device: to find out by allocating them can take the machine down."""
    kind = torch.device(device)
    if kind.type == "cuda" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(kind).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    count = num_params(config)
    needed = weight_bytes(config, dtype) // num_parts
    if needed > total:
        raise ValueError(
            f"num_hidden_layers={config.num_layers}, hidden_size={config.hidden_size}: a model of "
            f"{count / 1e9:.1f} billion parameters takes {needed / 1e9:.0f} GB, and {kind.type} "
            f"has {total / 1e9:.0f} GB; choose a smaller model"
        )


def read_state(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a Hugging Face folder under the names of `hf_views`, mapped and not yet read;
    those in MXFP4 as bf16."""
    tensors = _read_tensors(_tensor_files(Path(folder)))
    return widened((name_here(name), tensor) for name, tensor in tensors)


def _tensor_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).is_file():
        try:
            weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
            if not all(Path(name).name == name for name in names):  # the index is not ours
                raise ValueError("it names files of other folders")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{folder / INDEX_FILE} is not a safetensors index (JSON with a weight_map): "
                "fetch it again"
            ) from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing == names and (folder / SINGLE_FILE).is_file():  # what was saved over shards
            return [folder / SINGLE_FILE]
        if missing:
            raise ValueError(
                f"{folder}: missing {', '.join(missing)}, which {INDEX_FILE} lists; fetch it again"
            )
        if SINGLE_FILE not in names and (folder / SINGLE_FILE).is_file():
            raise ValueError(
                f"{folder} holds {SINGLE_FILE} and {INDEX_FILE} of other files, which may be two "
                "models: remove the one that is not meant"
            )
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise ValueError(
            f"{folder} holds pickle weights (.bin), which run code when they are read; convert "
            "them once with transformers: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(folder)"
        )
    raise ValueError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; fetch the model again")


def _read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Tensors mapped from the files, not read until they are copied."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (safe_open is no mapping)
                    yield name, reader.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(
                f"{file.name} is truncated or no safetensors file ({error}); fetch it again"
            ) from error


def save_model(
    model: Transformer,
    folder: str | Path,
    extra_files_from: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a Hugging Face folder that `transformers` loads: config.json, safetensors (with an
    index where one file would exceed `max_shard_bytes`), and the tokenizer's files copied from
    `extra_files_from`. Not atomic: write to a fresh folder and rename it."""
    state = dict(export_state(model, dtype))
    write_folder(folder, model.config, state, max_shard_bytes=max_shard_bytes)
    copy_extra_files(extra_files_from, folder)


def copy_extra_files(source: str | Path | None, folder: str | Path) -> None:
    """The tokenizer's files of the folder `source`, if one is given, those that there are."""
    if source is None:
        return
    for name in (*_EXTRA_FILES, *template_files(source)):
        theirs, ours = Path(source) / name, Path(folder) / name
        if theirs.is_file() and theirs.resolve() != ours.resolve():
            ours.parent.mkdir(exist_ok=True)
            shutil.copyfile(theirs, ours)


def replace_model(
    model: Transformer, folder: str | Path, extra_files_from: str | Path | None = None
) -> None:
    """`save_model` whole or not at all, in place of what `folder` held. OSError says what to do."""
    replace_folder(folder, lambda draft: save_model(model, draft, extra_files_from))


def replace_folder(folder: str | Path, write: Callable[[Path], None]) -> None:
    """`write` fills a draft that then takes the place of `folder`, whole or not at all."""
    target = Path(folder)
    draft = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        write(draft)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(draft, target)
    except OSError as error:
        message = f"cannot write the model ({error.strerror}): make room on the disk, then --resume"
        raise OSError(error.errno, message, str(target)) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_folder(
    folder: str | Path,
    config: ModelConfig,
    state: dict[str, Tensor],
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """config.json and safetensors of tensors, given under the names of `hf_views`, in their
    dtype."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    write_config(path, config, state["model.embed_tokens.weight"].dtype)
    named = {name_in_folder(name, config): tensor for name, tensor in state.items()}
    _write_shards(path, named, max_shard_bytes)


def write_config(folder: Path, config: ModelConfig, dtype: torch.dtype) -> None:
    fields = config.to_hf_dict() | {"dtype": dtype_name(dtype)}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def _write_shards(folder: Path, state: dict[str, Tensor], max_shard_bytes: int) -> None:
    clear_tensor_files(folder)
    sizes = {name: tensor.nbytes for name, tensor in state.items()}
    files = shard_names(sizes, max_shard_bytes)
    for file, names in files.items():
        shard = {name: state[name] for name in names}
        write_tensors(folder / file, shard, metadata={"format": "pt"})
    write_index(folder, files, sizes)


def clear_tensor_files(folder: Path) -> None:
    """Remove what an earlier export left."""
    for stale in (*folder.glob("model*.safetensors"), folder / INDEX_FILE):
        stale.unlink(missing_ok=True)


def shard_names(sizes: dict[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """File names with the tensors of each, given the tensors' bytes."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, num_bytes in sizes.items():
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def write_index(folder: Path, files: dict[str, list[str]], sizes: dict[str, int]) -> None:
    """The index that says which file holds which tensor; a single file needs none."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
