"""Pictures in tiles (SmolVLM, Idefics 3): where patches stand in the table of positions, tiles that
are all 0, spans and tokens of a chat by hand, and configurations that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from seen_families import CASES, draw_text, draw_tile_fields, planes
from tiled_chats import chat_of, tiling_tokenizer
from torch import Tensor
from vision_cases import draw_pixels

from nanoengine.formats.hf import load_model
from nanoengine.model.config import ModelConfig
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer, seeing_tokenizer
from nanoengine.vision.tower import bucket_taps, patch_places
from nanoengine.vision.towers import read_vision_config, write_vision_config
from nanoengine.vision.whole_pictures import by_picture

# -- the table of positions ------------------------------------------------------------------------


def test_patches_fall_on_rows_of_the_table_by_their_fraction() -> None:
    """Of a table of 3 x 3: four patches a side begin at 0, 1/4, 1/2, 3/4 of it, which are its rows
    0, 0, 1, 2; two begin at 0 and 1/2."""
    taps, weights = bucket_taps((1, 4, 2), 1, 3)
    rows, columns = (0, 0, 1, 2), (0, 1)
    assert taps[:, 0].tolist() == [3 * row + column for row in rows for column in columns]
    assert weights.tolist() == [[1.0]] * 8


@pytest.mark.parametrize(("side", "merge"), [(26, 2), (27, 3), (32, 4)])
def test_tiles_of_published_models_take_the_rows_in_order(side: int, merge: int) -> None:
    """Idefics 3, SmolVLM, and its small ones."""
    rows, columns = patch_places((1, side, side), merge)
    assert torch.equal(bucket_taps((1, side, side), merge, side)[0][:, 0], rows * side + columns)


def test_a_fraction_that_fp32_rounds_down_takes_the_row_before() -> None:
    """Of 19 patches on a table of 19 the one at 12 / 19 takes row 11, in transformers as well, and
    none takes row 12."""
    taps, _ = bucket_taps((1, 1, 19), 1, 19)
    assert taps[:, 0].tolist() == [*range(12), 11, *range(13, 19)]


def test_they_are_the_rows_that_transformers_takes() -> None:
    """Through its own embeddings, whose table holds the number of each row."""
    modeling = pytest.importorskip("transformers.models.smolvlm.modeling_smolvlm")
    configuration = pytest.importorskip("transformers.models.smolvlm.configuration_smolvlm")
    for side in (2, 3, 7, 13, 19, 27, 31, 38, 49):
        config = configuration.SmolVLMVisionConfig(
            hidden_size=1, num_attention_heads=1, patch_size=1, image_size=side
        )
        theirs = modeling.SmolVLMVisionEmbeddings(config)
        torch.nn.init.zeros_(theirs.patch_embedding.weight)
        torch.nn.init.zeros_(theirs.patch_embedding.bias)
        theirs.position_embedding.weight.data = torch.arange(side**2).float().unsqueeze(1)
        for size in (1, 2, 5, 13, 26, 33, side):
            mask = torch.ones(1, size, size, dtype=torch.bool)
            found = theirs(torch.zeros(1, 3, size, size), mask)[0, :, 0]
            assert torch.equal(bucket_taps((1, size, size), 1, side)[0][:, 0], found.long())


# -- tiles that are all 0 --------------------------------------------------------------------------


def test_a_tile_of_zeros_is_a_tile(tmp_path: Path) -> None:
    """transformers takes such a tile for padding and drops it, unless there is no other; then the
    placeholders of a picture that really is so are too many, and it raises. Here it is looked at as
    any other: what transformers says where it says something."""
    theirs = CASES["smolvlm"].model(1)
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    vision = model.config.vision
    side = 2 * vision.spatial_merge_size
    grids = [(1, side, side)] * 2
    dark, seen = draw_pixels(vision, grids).split(side**2)
    dark = torch.zeros_like(dark)

    def of_theirs(rows: Tensor) -> Tensor:
        images = planes(theirs, rows, side)[None]
        return torch.cat(theirs.model.get_image_features(images).pooler_output)

    with torch.no_grad():
        ours = model.visual(torch.cat([dark, seen]), grids).features_TE
        alone = of_theirs(dark)
        assert torch.allclose(ours[: len(alone)], alone, atol=1e-5)
        assert torch.allclose(ours[len(alone) :], of_theirs(torch.cat([dark, seen])), atol=1e-5)
    ids, _ = draw_text(grids, vision.spatial_merge_size)
    both = CASES["smolvlm"].inputs(theirs, ids, grids, torch.cat([dark, seen]))
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        theirs(**both)


# -- a chat ----------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path: Path) -> SeeingTokenizer:
    return tiling_tokenizer(tmp_path)


def test_the_tokens_and_spans_of_two_pictures_by_hand(tokenizer: SeeingTokenizer) -> None:
    """One of 64 x 64 in two rows of two tiles and the whole, one of 20 x 64 in a row of two."""
    one = tokenizer.token_to_id
    chat = chat_of(tokenizer, (64, 64), (20, 64))
    around, slot = one("<fake_token_around_image>"), [one("<image>")] * 4
    newline, two, whole, ab = one("\n"), one("\n\n"), one("<global-img>"), [one("a"), one("b")]

    def tile(row: int, column: int) -> list[int | None]:
        return [around, one(f"<row_{row}_col_{column}>"), *slot]

    last = [around, whole, *slot, around, *ab]
    expected = [
        *tile(1, 1), *tile(1, 2), newline,
        *tile(2, 1), *tile(2, 2), two, *last,
        *tile(1, 1), *tile(1, 2), two, *last,
    ]  # fmt: skip
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False)
    assert ids == expected
    spans = tokenizer.images_in(ids, chat, 0)
    assert [span.start for span in spans] == [2, 8, 15, 21, 28, 37, 43, 50]
    assert {(span.length, span.grid) for span in spans} == {(4, (1, 4, 4))}
    assert len({span.key for span in spans}) == 8
    assert len({span.sha256 for span in spans}) == 2
    assert [span.start for span in tokenizer.images_in(ids, chat, 100)][:2] == [102, 108]
    assert tokenizer.store.processor.size_of(spans[0].grid) == (32, 32), "of a tile, in pixels"


def test_tiles_are_counted_as_the_pictures_that_they_are_of(tokenizer: SeeingTokenizer) -> None:
    """The first picture is shown twice, in two rows of two tiles and the whole; the other has a row
    of two and the whole, and the last is one tile itself."""
    one, other = chat_of(tokenizer, (64, 64), (20, 64))[0]["content"][::2]
    (small,) = chat_of(tokenizer, (8, 8))[0]["content"][::2]
    chat = [{"role": "user", "content": [one, one, other, small, small]}]
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False)
    spans = tokenizer.images_in(ids, chat, 0)
    pictures = by_picture(spans)
    sizes = [tokenizer.store.ready(part["sha256"]).grid[0] for part in chat[0]["content"]]
    assert [len(picture) for picture in pictures] == sizes and sizes[:3] == [5, 5, 3]
    assert [span for picture in pictures for span in picture] == spans and by_picture([]) == []


def test_the_values_of_a_tiles_span_are_its_pixels(tokenizer: SeeingTokenizer) -> None:
    """Left and right halves of a picture that needs no resizing, in patches of 8 x 8 by squares."""
    chat = chat_of(tokenizer, (32, 64))
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False)
    left, right, whole = tokenizer.images_in(ids, chat, 0)
    pixels = tokenizer.store.ready(left.sha256).pixels
    assert pixels.shape == (3, 32, 32, 3)
    for place, span in enumerate((left, right, whole)):
        values = tokenizer.store.values(span)
        assert values.shape == (16, 3 * 8 * 8)
        # the third patch begins the second row of the first square
        patch = torch.from_numpy(pixels[place, 8:16, 0:8].transpose(2, 0, 1).copy())
        assert torch.allclose(values[2].view(3, 8, 8), patch / 127.5 - 1, atol=1e-6)
    with pytest.raises(KeyError, match="made ready in another way"):
        tokenizer.store.values(type(left)(**{**vars(left), "key": "0" * 32}))


# -- bad input -------------------------------------------------------------------------------------


def test_tiles_of_another_number_of_tokens_are_refused(
    tokenizer: SeeingTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "processor_config.json").write_text('{"image_seq_len": 5}')
    with pytest.raises(ValueError, match=r"image_seq_len is 5, must be what 4 x 4 patches"):
        seeing_tokenizer(tmp_path, tmp_path / "pictures")


def test_a_vision_config_of_tiles_is_read_back_as_it_was_written() -> None:
    around = {"spatial_merge_size": 3, "out_hidden_size": 48}
    for seed in range(50):
        config = read_vision_config("smolvlm", draw_tile_fields(seed), **around)
        assert read_vision_config("smolvlm", write_vision_config(config), **around) == config


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("vision_config", {"image_size": 1}, "image_size=1: must be an integer of at least"),
        ("vision_config", {"window_size": 7}, "window_size: not known here"),
        ("vision_config", {"rope_parameters": {}}, "rope_parameters: not known here"),
        ("vision_config", {"hidden_size": 13, "num_attention_heads": 2}, "equally many numbers"),
        ("text_config", {"model_type": "mistral"}, "model_type='mistral': not supported in"),
        ("text_config", {"rope_scaling": {"mrope_section": [4, 2, 2]}}, "mrope_section"),
        (None, {"scale_factor": 0}, "spatial_merge_size=0"),
    ],
)
def test_a_config_that_says_something_else_is_refused_by_name(
    part: str | None, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    CASES["smolvlm"].config(0).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    target = fields if part is None else fields[part]
    target |= change
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf_dict(fields)


def test_the_published_fields_are_read() -> None:
    """Those of SmolVLM2's 500M, most of which have defaults."""
    fields = {
        "model_type": "smolvlm",
        "image_token_id": 49190,
        "scale_factor": 4,
        "pad_token_id": 128002,
        "tie_word_embeddings": False,
        "text_config": {
            "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 960,
            "intermediate_size": 2560, "is_llama_config": True, "max_position_embeddings": 8192,
            "model_type": "llama", "num_attention_heads": 15, "num_hidden_layers": 32,
            "num_key_value_heads": 5, "pad_token_id": 2, "pixel_shuffle_factor": 4,
            "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False,
            "rope_theta": 100000, "use_resampler": False, "vocab_size": 49280,
        },
        "vision_config": {
            "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512},
            "model_type": "smolvlm_vision", "num_attention_heads": 12, "patch_size": 16,
            "size": {"longest_edge": 2048}, "tie_word_embeddings": False, "use_base_siglip": False,
        },
    }  # fmt: skip
    config = ModelConfig.from_hf_dict(fields)
    vision = config.vision
    assert (vision.depth, vision.intermediate_size, vision.table_side) == (12, 3072, 32)
    assert (vision.patches_per_token, vision.out_hidden_size) == (16, 960)
    assert (config.rope_theta, config.image_token_id) == (100000.0, 49190)
