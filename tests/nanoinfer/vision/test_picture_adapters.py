"""Adapters of a model that sees: on its decoder alone, beside pictures, and as folders of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_picture_exactness import ASKED, Seeing, params_of, seeing_of

from nanoengine.adapters.lora import choose_targets, merge_lora
from nanoengine.adapters.lora_adapter import LoraAdapter, LoraBase
from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.formats.hf import hf_views, load_model
from nanoinfer.params import Output
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model

NAMES = ("", "a", "b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model")


def adapter_of(folder: Path, out: Path, seed: int, **options: Any) -> Path:
    """A folder of an adapter that changes what the model says."""
    adapter = LoraAdapter(LoraBase(load_model(folder)), LoraConfig(rank=4, **options), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, one in adapter.named_parameters():
            if name.endswith("lora_B"):
                one.copy_(torch.randn(one.shape, generator=generator))
    adapter.save(out)
    return out


@pytest.fixture
def adapters(folder: Path, tmp_path: Path) -> dict[str, Path]:
    return {name: adapter_of(folder, tmp_path / name, seed) for seed, name in enumerate("ab")}


def asked(seeing: Seeing) -> list[tuple[list[int], Any]]:
    found = []
    for seed, pictures in enumerate(ASKED):
        ids, images = seeing.prompt(*pictures)
        found += [(ids, params_of(seed, images, adapter=name)) for name in NAMES]
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_requests_of_several_adapters_have_the_bits_of_each_alone(
    folder: Path, tmp_path: Path, adapters: dict[str, Path], dtype: str
) -> None:
    """Also in chunks that end within a picture, and with what others left in the cache."""
    seeing = seeing_of(folder, tmp_path, dtype)
    requests, alone = asked(seeing), list[Output]()
    for ids, params in requests:
        engine = seeing.engine(prefix_caching=False, max_num_seqs=1)
        if params.adapter:
            engine.load_adapter(params.adapter, adapters[params.adapter])
        alone += engine.generate([ids], params)
    looks = seeing.model.sight.num_looks
    for shape in ({}, {"max_batch_tokens": 7, "max_num_seqs": 4}):
        engine = seeing.engine(**shape)
        for name, source in adapters.items():
            engine.load_adapter(name, source)
        for _ in range(2):
            outputs = engine.generate([ids for ids, _ in requests], [one for _, one in requests])
            assert [(x.ids, x.logps) for x in outputs] == [(x.ids, x.logps) for x in alone], shape
    assert seeing.model.sight.num_looks == looks == 4, "the tower has no adapters"
    firsts = [one.logps[0] for one in alone]
    assert len(set(firsts)) == len(firsts), "each says something else"


def test_an_adapter_says_what_the_merged_model_says(
    folder: Path, tmp_path: Path, adapters: dict[str, Path]
) -> None:
    """Up to the rounding of fp32, in which W + BA is rounded once."""
    seeing, merged = (seeing_of(folder, tmp_path, "fp32") for _ in range(2))
    merge_lora(merged.model, adapters["a"])
    engine = seeing.engine()
    engine.load_adapter("a", adapters["a"])
    for pictures in ASKED:
        ids, images = seeing.prompt(*pictures)
        (said,) = engine.generate([ids], params_of(3, images, adapter="a"))
        (same,) = merged.engine().generate([ids], params_of(3, images))
        assert said.ids == same.ids
        assert said.logps == pytest.approx(same.logps, abs=1e-4)


def test_folders_are_those_of_peft(folder: Path, tmp_path: Path, adapters: dict[str, Path]) -> None:
    peft = pytest.importorskip("peft")
    from transformers import Qwen3VLForConditionalGeneration

    theirs = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    wrapped = peft.PeftModel.from_pretrained(theirs, str(adapters["a"]))
    wrapped.save_pretrained(tmp_path / "again")
    again = tmp_path / "again" / "adapter_model.safetensors"
    ours, saved = (load_file(one) for one in (adapters["a"] / again.name, again))
    assert ours.keys() == saved.keys()
    assert all(ours[name].equal(saved[name]) for name in ours)
    model = load_model(folder)
    before = {name: view.clone() for name, view in hf_views(model).items()}
    merge_lora(model, tmp_path / "again")
    state = wrapped.merge_and_unload().state_dict()
    for name, view in hf_views(model).items():
        wanted = state[name.replace("model.layers", "model.language_model.layers")] if (
            "model.layers" in name
        ) else before[name]  # fmt: skip
        torch.testing.assert_close(view, wanted, rtol=0, atol=1e-5)
        assert ("_proj." in name) != view.equal(before[name])


@pytest.mark.parametrize("target", ["visual", "qkv", "linear_fc1", r".*visual.*proj"])
def test_the_tower_is_refused_as_a_target_by_name(folder: Path, target: str) -> None:
    with pytest.raises(ValueError, match="is of the vision tower, which an adapter leaves"):
        choose_targets(load_model(folder), [target])
