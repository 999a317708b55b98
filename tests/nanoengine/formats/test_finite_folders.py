"""A folder whose weights hold NaN or infinity is refused at load, by the tensor's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import FAMILY_SHAPES, make_reference, save_reference

from kernels.memory import all_finite
from nanoengine.formats.hf import export_state, hf_views, load_model, load_stages, read_state
from nanoengine.formats.mxfp4 import widen_mxfp4, widened
from nanoengine.formats.sources import resolve_model
from nanoengine.heads.sequence_classifier import load_sequence_classifier
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.stage import Stage

BAD = (float("nan"), float("inf"), float("-inf"))


def spoil(folder: Path, name: str, value: float, dtype: torch.dtype | None = None) -> None:
    file = folder / "model.safetensors"
    tensors = {key: x.to(dtype or x.dtype) for key, x in load_file(file).items()}
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_folder_with_one_such_number_is_refused_by_its_name(
    value: float, kind: torch.dtype, tmp_path: Path
) -> None:
    save_reference("qwen2-untied-theta", tmp_path)
    spoil(tmp_path, "model.layers.1.mlp.up_proj.weight", value, kind)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' holds NaN"):
            load_model(tmp_path, dtype)
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        load_model(tmp_path, torch.bfloat16, is_int8=True)
    spoil(tmp_path, "model.layers.1.mlp.up_proj.weight", 1.0)
    load_model(tmp_path)


@pytest.mark.parametrize("shape", FAMILY_SHAPES)
def test_every_tensor_of_every_family_is_looked_at(shape: str, tmp_path: Path) -> None:
    save_reference(shape, tmp_path)
    names = list(hf_views(load_model(tmp_path)))
    for name in names[:: max(1, len(names) // 6)]:
        spoil(tmp_path, name, float("nan"))
        with pytest.raises(ValueError, match=f"tensor '{name}' holds NaN"):
            load_model(tmp_path)
        spoil(tmp_path, name, 0.5)


def test_a_refused_state_and_refused_stages_write_nothing(tmp_path: Path) -> None:
    save_reference("llama-mha-untied", tmp_path)
    shape = ModelConfig.from_folder(tmp_path)
    last = f"model.layers.{shape.num_layers - 1}.mlp.down_proj.weight"
    spoil(tmp_path, last, float("nan"))
    stages = [Stage(shape, index, 3) for index in range(3)]
    before = [{name: x.clone() for name, x in export_state(stage)} for stage in stages]
    with pytest.raises(ValueError, match=f"'{last}' holds NaN or infinity"):
        load_stages(stages, read_state(tmp_path))
    for stage, state in zip(stages, before, strict=True):
        assert all(torch.equal(x, state[name]) for name, x in export_state(stage))
    # a stage that does not hold the tensor does not read it
    load_stages(stages[:2], read_state(tmp_path))


def test_a_gguf_file_is_no_way_around_it(tmp_path: Path) -> None:
    reference = make_reference("llama-gqa-tied")
    with torch.no_grad():
        reference.get_submodule("model.layers.0.mlp.down_proj").weight[0, 0] = float("nan")
    write_gguf(tmp_path / "m.gguf", reference)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj\.weight' holds NaN"):
        load_model(resolve_model(tmp_path / "m.gguf", tmp_path / "cache", notify=lambda _: None))


def test_a_score_head_is_looked_at_too(tmp_path: Path) -> None:
    save_reference("llama-mha-untied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight")
    for value, message in ((float("nan"), "'score.weight' holds NaN"), (1.0, None)):
        head = torch.full((1, 48), value)
        save_file({**tensors, "score.weight": head}, tmp_path / "model.safetensors")
        if message is None:
            load_sequence_classifier(tmp_path)
            continue
        with pytest.raises(ValueError, match=message):
            load_sequence_classifier(tmp_path)


@pytest.mark.usefixtures("cpu_path")
def test_tensors_of_all_kinds_are_asked_together() -> None:
    """Each has its own answer, whether the kernel or PyTorch gives it."""
    good = torch.randn(9, 4)
    bad = good.clone()
    bad[3, 1] = float("nan")
    xs = [good, bad.t(), bad.half(), torch.zeros(0), good.t(), bad, torch.arange(3), bad.bfloat16()]
    assert all_finite(xs) == [True, False, False, True, True, False, True, False]


def test_mxfp4_is_exact_at_every_scale_or_refused() -> None:
    """All 256 scales with all 16 numbers, against products in fp64."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    every = [bits & 7 for bits in range(16)]
    largest = torch.finfo(torch.bfloat16).max
    refused = []
    for scale in range(256):
        for number in every:
            sign = torch.tensor([(number | 8) << 4 | number] * 16, dtype=torch.uint8)
            blocks, scales = sign.view(1, 1, 1, 16), torch.tensor([[[scale]]], dtype=torch.uint8)
            exact = magnitudes[number] * 2.0 ** (scale - 127)
            if scale == 255 or exact > largest:
                with pytest.raises(ValueError, match=f"scales: {scale} "):
                    widen_mxfp4(blocks, scales)
                refused.append((scale, magnitudes[number]))
                continue
            found = widen_mxfp4(blocks, scales).double().flatten()
            assert torch.equal(found, torch.tensor([exact, -exact] * 16).double()), scale
    assert {(s, m) for s, m in refused if s < 255} == {
        (253, 4.0), (253, 6.0), (254, 2.0), (254, 3.0), (254, 4.0), (254, 6.0)
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"experts\.down_proj: scales: 255 stands for NaN"):
        list(widened([("experts.down_proj_blocks", blocks), ("experts.down_proj_scales", scales)]))


def test_a_tied_head_of_nan_is_refused(tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    shape = ModelConfig.from_folder(tmp_path)
    assert shape.tie_word_embeddings and Transformer(replace(shape, num_layers=1)).head is None
    spoil(tmp_path, "model.embed_tokens.weight", float("nan"))
    with pytest.raises(ValueError, match=r"'model\.embed_tokens\.weight' holds NaN"):
        load_model(tmp_path)
