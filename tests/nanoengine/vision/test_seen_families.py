"""Every family that sees beside transformers: features, positions, logits, fp64 gradients, and
folders in both directions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from seen_families import CASES, Case, Wide, draw_text
from torch import Tensor
from vision_cases import SEEDS, draw_pixels

from nanoengine.formats.hf import SINGLE_FILE, hf_views, load_model, save_model
from nanoengine.model.attention import PackedContext
from nanoengine.model.config import ModelConfig
from nanoengine.vision.rope_positions import rope_positions
from nanoengine.vision.seeing_transformer import ImageRows, SeeingTransformer
from nanoengine.vision.tower_adamw import freeze
from nanoengine.vision.tower_names import frozen_names

FAMILIES = pytest.mark.parametrize("family", CASES)


def loaded(theirs: Any, folder: Path, dtype: torch.dtype = torch.float32) -> SeeingTransformer:
    theirs.save_pretrained(folder)
    model = load_model(folder, dtype)
    assert isinstance(model, SeeingTransformer)
    return model


def our_logits(
    model: SeeingTransformer, ids: Tensor, spans: Any, pixels: Tensor
) -> tuple[Tensor, Tensor]:
    """And the positions by which they were made."""
    seen = model.visual(pixels, [span.grid for span in spans])
    places = torch.cat([torch.arange(span.start, span.end) for span in spans])
    positions = torch.arange(len(ids))
    if model.rope_axes is not None:
        positions = torch.from_numpy(rope_positions(0, len(ids), spans))
    context = PackedContext.from_lengths([len(ids)])
    rows = ImageRows(places, seen.features_TE, seen.deep)
    return model.logits(model(ids, positions, context, rows=rows)), positions


def near(ours: Tensor, theirs: Tensor, bound: float) -> bool:
    return bool((ours - theirs).abs().max() <= bound * theirs.abs().max().clamp(min=1))


def asked(case: Case, theirs: Any, model: SeeingTransformer, seed: int) -> tuple[Any, ...]:
    """Ids, spans and patches of a drawn text, and transformers' inputs for them."""
    vision = model.config.vision
    grids = case.grids(vision, seed)
    ids, spans = draw_text(grids, vision.spatial_merge_size, seed)
    pixels = draw_pixels(vision, grids, seed).to(model.dtype)
    return ids, spans, pixels, case.inputs(theirs, ids, grids, pixels)


@FAMILIES
@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_features_positions_and_logits_are_those_of_transformers(
    family: str, seed: int, tmp_path: Path
) -> None:
    case = CASES[family]
    theirs = case.model(seed)
    model = loaded(theirs, tmp_path)
    for draw in range(3):
        ids, spans, pixels, inputs = asked(case, theirs, model, 10 * seed + draw)
        seen = model.visual(pixels, [span.grid for span in spans])
        wanted = case.features(theirs, inputs)
        assert len(wanted) == 1 + len(seen.deep)
        for ours, their in zip((seen.features_TE, *seen.deep), wanted, strict=True):
            assert near(ours, their, 1e-5)
        logits, positions = our_logits(model, ids, spans, pixels)
        assert torch.equal(positions, case.positions(theirs, inputs))
        assert near(logits, theirs(**inputs).logits[0], 2e-5)
        blind, _ = our_logits(model, ids, spans, pixels.flip(0) + 1.0)
        assert not near(blind, logits, 1e-3), "it looks"


def gradients(model: SeeingTransformer) -> dict[str, Tensor]:
    """Those of the model whose weights are the gradients, by the names of `hf_views`."""
    slopes = copy.deepcopy(model)
    for one, parameter in zip(slopes.parameters(), model.parameters(), strict=True):
        assert parameter.grad is not None
        one.data.copy_(parameter.grad)
    return hf_views(slopes)


@FAMILIES
@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_those_of_transformers_in_fp64(
    family: str, seed: int, tmp_path: Path
) -> None:
    case = CASES[family]
    theirs = case.model(seed).double()
    model = loaded(theirs, tmp_path, torch.float64)
    ids, spans, pixels, inputs = asked(case, theirs, model, seed)
    logits, _ = our_logits(model, ids, spans, pixels)
    slopes = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)).double()
    logits.backward(slopes)
    with Wide():
        theirs(**inputs).logits[0].backward(slopes)
    ours = gradients(model)
    idle = [name for name, one in theirs.named_parameters() if not one.grad.any()]
    # Of random towers with heads of a few numbers some attend to one patch alone. One expert a
    # token has the weight 1 whatever its router says; how that rounds is the processor's affair.
    may_rest = ["self_attn.k_proj", "self_attn.q_proj"]
    if getattr(theirs.config.get_text_config(), "num_experts_per_tok", 0) == 1:
        may_rest.append("mlp.gate.weight")
    assert len(idle) <= 4 and all(any(one in name for one in may_rest) for name in idle)
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        here = name.replace(".language_model.", ".").replace(".text_model.", ".")
        difference = (ours[here] - parameter.grad).abs().max()
        assert difference <= 1e-10 * parameter.grad.abs().max().clamp(min=1), name


@FAMILIES
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_comes_back_bit_for_bit(
    family: str, tie: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    case = CASES[family]
    theirs = case.model(2, tie=tie).to(dtype)
    model = loaded(theirs, tmp_path / "theirs", dtype)
    assert (model.head is None) == tie
    save_model(model, tmp_path / "ours")
    before, after = (load_file(tmp_path / name / SINGLE_FILE) for name in ("theirs", "ours"))
    assert before.keys() - {"lm_head.weight"} == after.keys() - {"lm_head.weight"}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    again, info = case.kind.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=dtype
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert ModelConfig.from_folder(tmp_path / "ours") == model.config
    for name, view in hf_views(load_model(tmp_path / "ours", dtype)).items():
        assert torch.equal(view, hf_views(model)[name]), name


@FAMILIES
def test_what_is_frozen_of_a_tower_has_the_names_of_its_folder(family: str, tmp_path: Path) -> None:
    """Also where one of our matrices is several of theirs, of which all are frozen."""
    model = loaded(CASES[family].model(0), tmp_path)
    freeze(model.visual, "merger")
    saved = load_file(tmp_path / SINGLE_FILE)
    blocks = {
        name.removeprefix("model.")
        for name in saved
        if ("visual." in name or "vision_model." in name) and "merger" not in name
    }
    found = [name.removeprefix("model.") for name in frozen_names(model.visual)]
    assert len(found) == len(set(found)) and set(found) == blocks
    freeze(model.visual, "all")
    assert frozen_names(model.visual) == []
