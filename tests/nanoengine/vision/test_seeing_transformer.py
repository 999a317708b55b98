"""A model that sees: its folder in and out, its logits beside transformers', and as a text model
the bits of one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration
from vision_cases import IDS, draw_pixels, their_model

from nanoengine.formats.hf import SINGLE_FILE, hf_views, load_model, save_model
from nanoengine.model.attention import PackedContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.spans import ImageSpan
from nanoengine.vision.seeing_transformer import (
    ImageRows,
    PicturePlaces,
    SeeingTransformer,
    rope_axes,
)

GRIDS = [(1, 4, 6), (1, 2, 4)]
DEEP = {"depth": 3, "deepstack_visual_indexes": [0, 2], "spatial_merge_size": 2}


@pytest.fixture(scope="module")
def theirs() -> Qwen3VLForConditionalGeneration:
    return their_model(1, **DEEP)


@pytest.fixture
def folder(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, places of picture tokens): text, a picture of 2 x 3 tokens, text, one of 1 x 2."""
    start, end, image = (
        IDS[f"{name}_token_id"] for name in ("vision_start", "vision_end", "image")
    )
    ids = [5, 6, start, *[image] * 6, end, 7, 8, 9, start, *[image] * 2, end, 11]
    ids = torch.tensor(ids)
    return ids, (ids == image).nonzero().squeeze(1)


def their_logits(model, ids, pixels):
    types = (ids == IDS["image_token_id"]).int()
    grid = torch.tensor(GRIDS)
    inputs = {"input_ids": ids[None], "mm_token_type_ids": types[None], "image_grid_thw": grid}
    with torch.no_grad():
        logits = model(**inputs, pixel_values=pixels).logits[0]
    return logits, model.model.get_rope_index(**inputs)[0][:, 0].T


def our_logits(model, ids, places, positions, pixels, **options):
    seen = model.visual(pixels, GRIDS)
    rows = ImageRows(places, seen.features_TE, seen.deep)
    context = PackedContext.from_lengths([len(ids)])
    return model.logits(model(ids, positions, context, rows=rows, **options))


def test_logits_over_pictures_are_those_of_transformers(theirs, folder):
    model = load_model(folder)
    assert isinstance(model, SeeingTransformer)
    ids, places = tokens()
    pixels = draw_pixels(model.config.vision, GRIDS)
    wanted, positions = their_logits(theirs, ids, pixels)
    with torch.no_grad():
        found = our_logits(model, ids, places, positions, pixels)
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max().clamp(min=1)
    # a model that does not look, or adds the deep rows elsewhere, is far away
    with torch.no_grad():
        blind = our_logits(model, ids, places, positions, pixels.flip(0))
        flat = our_logits(model, ids, places, positions[:, 0], pixels)
    assert (blind - wanted).abs().max() > 1e-2 and (flat - wanted).abs().max() > 1e-2


def test_two_packed_sequences_have_the_bits_of_each_alone(folder):
    model = load_model(folder, torch.bfloat16)
    ids, places = tokens()
    pixels = draw_pixels(model.config.vision, GRIDS)
    positions = torch.arange(len(ids)).unsqueeze(1).expand(-1, 3)
    with torch.no_grad():
        seen = model.visual(pixels, GRIDS)
        alone = our_logits(model, ids, places, positions, pixels)
        rows = ImageRows(
            torch.cat([places, places + len(ids)]),
            seen.features_TE.repeat(2, 1),
            tuple(one.repeat(2, 1) for one in seen.deep),
        )
        context = PackedContext.from_lengths([len(ids)] * 2)
        both = model.logits(model(ids.repeat(2), positions.repeat(2, 1), context, rows=rows))
    assert torch.equal(both, alone.repeat(2, 1))


def test_gradients_reach_the_tower_through_every_path(folder):
    model = load_model(folder, torch.float64)
    ids, places = tokens()
    pixels = draw_pixels(model.config.vision, GRIDS).double()
    positions = torch.arange(len(ids)).unsqueeze(1).expand(-1, 3)
    grads = []
    for checkpoints in (False, True):
        logits = our_logits(
            model, ids, places, positions, pixels, activation_checkpointing=checkpoints
        )
        logits.square().sum().backward()
        grads.append([one.grad.clone() for one in model.parameters()])
        model.zero_grad()
    assert all(one.abs().max() > 0 for one in grads[0])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_without_pictures_it_has_the_bits_of_a_text_model(folder):
    model = load_model(folder, torch.bfloat16)
    shape = {name: getattr(model.config, name) for name in ModelConfig.__dataclass_fields__}
    text = Transformer(ModelConfig(**shape | {"model_type": "qwen3"}), torch.bfloat16)
    views = hf_views(model)
    for name, view in hf_views(text).items():
        view.copy_(views[name])
    text.repack()
    ids, positions = torch.arange(20), torch.arange(20)
    context = PackedContext.from_lengths([20])
    with torch.no_grad():
        wanted = text(ids, positions, context)
        assert torch.equal(model(ids, positions, context), wanted)
        assert torch.equal(model(ids, positions.unsqueeze(1).expand(-1, 3), context), wanted)
        none = ImageRows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 48).bfloat16())
        assert torch.equal(model(ids, positions, context, rows=none), wanted)


def test_axes_of_the_rope_are_interleaved():
    """16 numbers a head, sections 4, 2, 2: t h w t h w t t."""
    assert rope_axes((4, 2, 2)).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert rope_axes((24, 20, 20)).bincount().tolist() == [24, 20, 20]


def test_a_rank_keeps_the_pictures_that_its_rows_read():
    """Pictures of 2, 3 and 1 tokens; the run reads a0 a1 . b0 b1 b2 . a1 c0, its last but one row
    the first picture again."""
    spans = [
        ImageSpan(start=0, length=n, key=name, grid=(1, 2, 2 * n), sha256=name * 64)
        for name, n in zip("abc", (2, 3, 1), strict=True)
    ]
    places = torch.tensor([0, 1, 3, 4, 5, 7, 8])
    whole = PicturePlaces(tuple(spans), places, torch.tensor([0, 1, 2, 3, 4, 1, 5]))
    assert whole.num_seen == 6
    held = whole.held(torch.tensor([2, 8, 4, 5]), num_rows=9)  # in the rank's own order
    assert [span.key for span in held.spans] == ["b", "c"]
    assert held.places_P.tolist() == [2, 3, 1], "b1, b2 and c0 are its rows 2, 3 and 1"
    assert held.chosen_P.tolist() == [1, 2, 3], "of b0, b1, b2, c0"
    none = whole.held(torch.tensor([2, 6]), num_rows=9)
    assert none.spans == () and len(none.places_P) == len(none.chosen_P) == 0


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_comes_back_bit_for_bit(tmp_path, tie, dtype):
    theirs = their_model(2, tie=tie, **DEEP).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs", dtype)
    assert (model.head is None) == tie
    save_model(model, tmp_path / "ours")
    before, after = (load_file(tmp_path / name / SINGLE_FILE) for name in ("theirs", "ours"))
    assert before.keys() - {"lm_head.weight"} == after.keys() - {"lm_head.weight"}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    again, info = Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=dtype
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert ModelConfig.from_folder(tmp_path / "ours") == model.config
    assert again.config.text_config.rope_parameters["mrope_section"] == [4, 2, 2]
    same = load_model(tmp_path / "ours", dtype)
    for name, view in hf_views(same).items():
        assert torch.equal(view, hf_views(model)[name]), name


def test_towers_are_read_in_either_spelling(folder):
    wanted = {name: view.clone() for name, view in hf_views(load_model(folder)).items()}
    tensors = load_file(folder / SINGLE_FILE)
    renamed = {name.replace("model.visual.", "visual."): x for name, x in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / SINGLE_FILE, metadata={"format": "pt"})
    for name, view in hf_views(load_model(folder)).items():
        assert torch.equal(view, wanted[name])


def test_a_tower_without_one_of_its_tensors_is_refused_by_name(folder):
    tensors = load_file(folder / SINGLE_FILE)
    del tensors["model.visual.merger.norm.bias"]
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: model\.visual\.merger\.norm\.bias"):
        load_model(folder)


def test_fresh_weights_are_drawn_for_the_tower_too(folder):
    model = SeeingTransformer(ModelConfig.from_folder(folder))
    model.init_weights(0)
    drawn = {name: view for name, view in hf_views(model).items() if "visual" in name}
    assert torch.equal(drawn["model.visual.blocks.0.norm1.weight"], torch.ones(drawn[
        "model.visual.blocks.0.norm1.weight"
    ].shape))  # fmt: skip
    assert drawn["model.visual.blocks.0.norm1.bias"].abs().max() == 0
    assert 0.01 < drawn["model.visual.blocks.0.attn.qkv.weight"].std() < 0.03
    text = Transformer(
        ModelConfig(**{
            name: getattr(model.config, name) for name in ModelConfig.__dataclass_fields__
        } | {"model_type": "qwen3"})
    )  # fmt: skip
    text.init_weights(0)
    assert all(torch.equal(hf_views(model)[name], view) for name, view in hf_views(text).items())


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("text_config", {"rope_parameters": {"alpha": 2}}, "rope_parameters: alpha: not known"),
        ("text_config", {"rope_parameters": {"mrope_section": [4, 2, 1]}}, "mrope_section"),
        ("vision_config", {"fullatt_block_indexes": [1]}, "fullatt_block_indexes: not known"),
        ("vision_config", {"out_hidden_size": 64}, "out_hidden_size=64: must be the decoder's"),
        (None, {"vision_config": None}, "vision_config=None: must be an object"),
        ("text_config", {"is_causal": False}, "is_causal=false: not supported"),
        (None, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantised"),
        (None, {"transformers_weights": "x.safetensors"}, "transformers_weights='x.safetensors'"),
    ],
)
def test_a_config_that_says_something_else_is_refused_by_name(folder, part, change, message):
    fields = config_of(folder)
    target = fields if part is None else fields[part]
    for name, value in change.items():
        is_rope = name == "rope_parameters"
        target[name] = {**target[name], **value} if is_rope else value
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf_dict(fields)


def test_the_outer_field_alone_ties_the_head(folder):
    fields = config_of(folder)
    for outer in (False, True):
        fields["tie_word_embeddings"] = outer
        fields["text_config"]["tie_word_embeddings"] = not outer
        assert ModelConfig.from_hf_dict(fields).tie_word_embeddings is outer


def test_a_text_model_with_axes_in_its_rope_is_refused():
    fields = {"model_type": "qwen3", "vocab_size": 9, "hidden_size": 16, "intermediate_size": 8}
    fields |= {"num_attention_heads": 1, "num_hidden_layers": 1, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20]}
    with pytest.raises(ValueError, match="mrope_section"):
        ModelConfig.from_hf_dict(fields | {"rope_scaling": rope})
