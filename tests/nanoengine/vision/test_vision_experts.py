"""Qwen3-VL with a mixture of experts: which way its stacked matrices lie in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from seen_families import CASES
from transformers import Qwen3VLMoeForConditionalGeneration

from nanoengine.formats.hf import SINGLE_FILE, hf_views, load_model
from nanoengine.model.config import ModelConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CASES["qwen3_vl_moe"].model(0).save_pretrained(tmp_path)
    return tmp_path


def fields_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_experts_are_read_as_published_and_as_transformers_writes_them(folder: Path) -> None:
    """On the hub a matrix of an expert is [in, out]; transformers turns it by its shape, too."""
    wanted = {name: view.clone() for name, view in hf_views(load_model(folder)).items()}
    tensors = load_file(folder / SINGLE_FILE)
    stacks = [name for name in tensors if ".mlp.experts." in name]
    assert {name.rsplit(".")[-1] for name in stacks} == {"gate_up_proj", "down_proj"}
    text = fields_of(folder)["text_config"]
    width, hidden = text["moe_intermediate_size"], text["hidden_size"]
    gate_up = next(name for name in stacks if name.endswith("gate_up_proj"))
    assert tensors[gate_up].shape[1:] == (2 * width, hidden), "[out, in], by transformers"
    turned = {name: x.mT.contiguous() if name in stacks else x for name, x in tensors.items()}
    save_file(turned, folder / SINGLE_FILE, metadata={"format": "pt"})
    for name, view in hf_views(load_model(folder)).items():
        assert torch.equal(view, wanted[name]), name
    theirs = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder)
    for name in stacks:
        assert torch.equal(theirs.state_dict()[name], tensors[name])


def test_an_expert_of_a_third_shape_is_refused_by_name(folder: Path) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    name = next(name for name in tensors if name.endswith("experts.down_proj"))
    tensors[name] = tensors[name][:, :, 1:].contiguous()
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"wrong shape: model\.layers\.\d\.mlp\.experts\.down_proj"
    ):
        load_model(folder)


@pytest.mark.parametrize("width", [48, 24])
def test_square_experts_are_refused_by_name(folder: Path, width: int) -> None:
    """Of hidden size 48: 48 makes `down_proj` square, 24 `gate_up_proj`."""
    fields = fields_of(folder)
    fields["text_config"]["moe_intermediate_size"] = width
    with pytest.raises(ValueError, match=rf"moe_intermediate_size={width}.*would be square"):
        ModelConfig.from_hf_dict(fields)


def test_the_number_of_experts_has_two_names(folder: Path) -> None:
    fields = fields_of(folder)
    text = fields["text_config"]
    (name,) = {"num_experts", "num_local_experts"} & text.keys()
    wanted = ModelConfig.from_hf_dict(fields)
    count = text.pop(name)
    assert wanted.num_experts == count
    for other in ("num_experts", "num_local_experts"):
        again = {**fields, "text_config": {**text, other: count}}
        assert ModelConfig.from_hf_dict(again) == wanted
    with pytest.raises(ValueError, match="num_experts=None: must be an integer"):
        ModelConfig.from_hf_dict(fields)


def test_the_chosen_experts_weigh_one_whatever_the_file_says(folder: Path) -> None:
    """transformers' router of this family knows no such switch."""
    fields = fields_of(folder)
    fields["text_config"]["norm_topk_prob"] = False
    assert ModelConfig.from_hf_dict(fields).norm_topk_prob
