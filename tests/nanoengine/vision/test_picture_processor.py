"""What a model is given of a picture is what `transformers` gives it, to the bit.

Its Pillow backend is the reference, from the bytes of a file to the numbers. Pillow is asked to
resize one side after the other, as its version 12 does (test_resize.py).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from nanoengine.vision.picture_sizes import fit_longest_edge, smart_resize, tile_sizes
from nanoengine.vision.pictures import read_picture
from nanoengine.vision.processor import PictureProcessor, TiledPictures, WholePictures

# Pillow's, where alpha is dropped, as `transformers` has it do.
pytestmark = pytest.mark.filterwarnings("ignore:Palette images with Transparency")

image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
qwen = pytest.importorskip(
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    reason="this version of transformers has no Pillow backend",
)
smolvlm = pytest.importorskip(
    "transformers.models.smolvlm.image_processing_pil_smolvlm",
    reason="this version of transformers has no Pillow backend",
)

QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN25 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 60_000,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SMOLVLM = {
    "image_processor_type": "SmolVLMImageProcessor",
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": 64},
    "resample": 1,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 256},
    "video_sampling": {"fps": 1},
}
AROUND = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}


def folder_of(path: Path, options: dict[str, Any], around: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "preprocessor_config.json").write_text(json.dumps(options))
    if around is not None:
        (path / "processor_config.json").write_text(json.dumps(around))
    return path


def load(path: Path, options: dict[str, Any], **around: Any) -> PictureProcessor:
    return PictureProcessor.from_folder(folder_of(path, options, around or None))


@pytest.fixture
def rows_first(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = image.Image.resize

    def resize(self: Any, size: tuple[int, int], resample: Any = None, **_: Any) -> Any:
        return at_once(at_once(self, (size[0], self.size[1]), resample), size, resample)

    monkeypatch.setattr(image.Image, "resize", resize)


def picture_files(count: int, seed: int) -> Iterator[bytes]:
    """From 8 to 2000 pixels a side, in every mode, turned in every way, a little of them smooth."""
    rng = np.random.default_rng(seed)
    modes = ("L", "LA", "P", "RGB", "RGBA", "I;16")
    for index in range(count):
        height, width = np.exp(rng.uniform(np.log(8), np.log(320), 2)).astype(int).tolist()
        if index in (3, 4):
            height, width = ((2000, 1400), (500, 2000))[index - 3]
        pixels = rng.integers(0, 256, (height, width, 4))
        if index % 3 == 0:
            pixels = (
                np.add.outer(np.arange(height), np.arange(width))[..., None] * (1, 2, 3, 1) % 256
            )
        mode = modes[index % len(modes)]
        if mode == "I;16":
            picture = image.fromarray((pixels[..., 0] * 3).astype(np.uint16))
        else:
            picture = image.fromarray(pixels.astype(np.uint8)).convert(mode)
        exif = image.Exif()
        exif[0x0112] = index % 9
        file = io.BytesIO()
        picture.save(file, "PNG", exif=exif, compress_level=1)
        yield file.getvalue()


@pytest.mark.parametrize("options", [QWEN3, QWEN25], ids=["qwen3_vl", "qwen2_5_vl"])
def test_qwens_numbers_are_those_of_transformers(
    options: dict[str, Any], tmp_path: Path, rows_first: None
) -> None:
    ours = load(tmp_path / "model", options)
    theirs = qwen.Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "model")
    for index, data in enumerate(picture_files(50, seed=options["patch_size"])):
        (tmp_path / "picture.png").write_bytes(data)
        expected = theirs(str(tmp_path / "picture.png"), return_tensors="np")
        taken = ours.process(read_picture(data))
        assert taken.grid == tuple(expected["image_grid_thw"][0].tolist()), index
        assert taken.num_tokens == math.prod(taken.grid) // 4
        values = ours.pixel_values(taken.pixels)
        assert values.dtype == np.float32
        assert np.array_equal(values.view(np.int32), expected["pixel_values"].view(np.int32)), index


@pytest.mark.parametrize("is_split", [True, False])
def test_smolvlms_numbers_are_those_of_transformers(
    is_split: bool, tmp_path: Path, rows_first: None
) -> None:
    folder_of(tmp_path / "model", SMOLVLM)
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"scale_factor": 2, "vision_config": {"patch_size": 16}})
    )
    ours = load(tmp_path / "model", SMOLVLM | {"do_image_splitting": is_split}, **AROUND)
    theirs = smolvlm.SmolVLMImageProcessorPil.from_pretrained(tmp_path / "model")
    for index, data in enumerate(picture_files(50 if is_split else 10, seed=7)):
        (tmp_path / "picture.png").write_bytes(data)
        path = str(tmp_path / "picture.png")
        expected = theirs(path, return_tensors="np", return_row_col_info=True)
        taken = ours.process(read_picture(data))
        assert taken.grid[1:] == (expected["rows"][0][0], expected["cols"][0][0]), index
        assert taken.grid[0] == len(taken.pixels) and taken.num_tokens == 4 * taken.grid[0]
        assert taken.patches == (1, 4, 4)
        values, wanted = ours.pixel_values(taken.pixels), expected["pixel_values"][0]
        # 4 x 4 patches of 16 x 16 a tile, in squares of 2 x 2
        cut = values.reshape(-1, 2, 2, 2, 2, 3, 16, 16).transpose(0, 5, 1, 3, 6, 2, 4, 7)
        planes = cut.reshape(wanted.shape)
        assert np.array_equal(planes.view(np.int32), wanted.view(np.int32)), index


def draw_sides(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return np.exp(rng.uniform(0, np.log(9000), (count, 2))).astype(int).tolist()


def test_qwens_sizes_are_those_of_transformers_and_extreme_shapes_are_refused() -> None:
    num_refused = 0
    limits = [(28, 3136, 12_845_056), (32, 65_536, 16_777_216), (16, 1, 10_000), (32, 4096, 65_536)]
    for index, (height, width) in enumerate(draw_sides(100_000, seed=0)):
        factor, least, most = limits[index % 4]
        options = {"factor": factor, "min_pixels": least, "max_pixels": most}
        try:
            expected = qwen.smart_resize(height, width, **options)
        except ValueError:
            num_refused += 1
            with pytest.raises(ValueError, match="at most 200 times the other"):
                smart_resize(height, width, **options)
            continue
        assert smart_resize(height, width, **options) == expected, (height, width)
    assert 10_000 < num_refused < 30_000
    # Half to even: 48 / 32 is 1.5 and goes up to 2, 80 / 32 is 2.5 and goes down to 2.
    sides = {"factor": 32, "min_pixels": 1, "max_pixels": 10**9}
    assert smart_resize(48, 80, **sides) == (64, 64)


class SizesAlone(smolvlm.SmolVLMImageProcessorPil):
    """Resizes shapes instead of pixels."""

    def resize(self, image: Any, size: Any, resample: Any = None) -> tuple[int, int]:
        return size.height, size.width


def test_smolvlms_sizes_are_those_of_transformers() -> None:
    theirs = SizesAlone()
    limits = [(2048, 512), (1456, 364), (5000, 384), (256, 64)]
    for index, (height, width) in enumerate(draw_sides(20_000, seed=1)):
        longest, tile = limits[index % 4]
        shape = np.broadcast_to(np.uint8(0), (3, height, width))
        fitted = smolvlm.get_resize_output_image_size(shape, longest)
        assert fit_longest_edge(height, width, longest) == fitted, (height, width)
        whole = theirs.resize_for_vision_encoder(np.broadcast_to(np.uint8(0), (3, *fitted)), tile)
        found = tile_sizes(height, width, longest_edge=longest, tile=tile)
        assert found.fitted == fitted and found.whole == whole
        grid = (whole[0] // tile, whole[1] // tile)
        assert (found.rows, found.columns) == ((0, 0) if grid == (1, 1) else grid)


def small_tokenizer() -> Tokenizer:
    """Two newlines are one token, as in SmolLM2's vocabulary."""
    letters = ["\n", *"abcdefghijklmnopqrstuvwxyz<>_|-0123456789:"]
    vocab = {piece: index for index, piece in enumerate([*letters, "\n\n"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("\n", "\n")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("x", "isolated")
    special = ["<|image_pad|>", "<image>", "<fake_token_around_image>", "<global-img>"]
    special += ["<|vision_start|>", "<|vision_end|>"]
    special += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer.add_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    return tokenizer


def test_a_picture_of_qwens_is_as_many_placeholders_as_merged_patches(tmp_path: Path) -> None:
    processor = load(tmp_path, QWEN3)
    tokenizer = small_tokenizer()
    pictures = [
        processor.process(np.zeros(shape, np.uint8)) for shape in ((64, 96, 3), (96, 64, 3))
    ]
    assert [one.grid for one in pictures] == [(1, 4, 6), (1, 6, 4)]
    around = "<|vision_start|><|image_pad|><|vision_end|>"
    found = tokenizer.encode(processor.expand(f"a{around}b{around}", pictures)).ids
    start, pad, end = (
        tokenizer.token_to_id(f"<|{name}|>") for name in ("vision_start", "image_pad", "vision_end")
    )
    a, b = tokenizer.encode("a").ids, tokenizer.encode("b").ids
    picture = [start, *[pad] * 6, end]
    assert found == [*a, *picture, *b, *picture]


def test_tiles_of_smolvlm_are_named_by_row_and_column_and_the_whole_comes_last(
    tmp_path: Path,
) -> None:
    processor = load(tmp_path, SMOLVLM, **AROUND)
    tokenizer = small_tokenizer()
    one = tokenizer.token_to_id
    wide = processor.process(np.zeros((100, 200, 3), np.uint8))  # 128x256: 2 rows of 4 tiles
    assert wide.grid == (9, 2, 4) and wide.num_tokens == 36
    found = tokenizer.encode(processor.expand("a\n<image>\nb", [wide])).ids
    around, slots = one("<fake_token_around_image>"), [one("<image>")] * 4
    expected = [one("a"), one("\n")]
    for row in (1, 2):
        for column in (1, 2, 3, 4):
            expected += [around, one(f"<row_{row}_col_{column}>"), *slots]
        expected += [one("\n") if row == 1 else one("\n\n")]
    expected += [around, one("<global-img>"), *slots, around, one("\n"), one("b")]
    assert found == expected
    processing = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    tokens = ("<fake_token_around_image>", "<image>", "<global-img>")
    for rows, columns, shape in ((2, 4, (100, 200, 3)), (4, 1, (400, 90, 3))):
        text = processing.get_image_prompt_string(rows, columns, 4, *tokens)
        assert processor.process(np.zeros(shape, np.uint8)).text == text
    single = load(tmp_path, SMOLVLM | {"do_image_splitting": False}, **AROUND)
    text = processing.get_image_prompt_string(0, 0, 4, *tokens)
    assert single.process(np.zeros((100, 200, 3), np.uint8)).text == text


def test_tokens_of_other_names_are_those_of_the_folder(tmp_path: Path) -> None:
    names = {"image_token": {"content": "<pic>"}, "extra_special_tokens": {"fake_image_token": "#"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    processor = load(tmp_path, SMOLVLM | {"do_image_splitting": False}, image_seq_len=4)
    taken = processor.process(np.zeros((8, 8, 3), np.uint8))
    assert processor.expand("<image><pic>", [taken]) == f"<image>#<global-img>{'<pic>' * 4}#"


def test_placeholders_and_pictures_are_as_many(tmp_path: Path) -> None:
    processor = load(tmp_path, QWEN3)
    taken = processor.process(np.zeros((64, 64, 3), np.uint8))
    assert processor.expand("no picture", []) == "no picture"
    for text, pictures in (("<|image_pad|>", []), ("a", [taken]), ("<|image_pad|>" * 3, [taken])):
        with pytest.raises(ValueError, match=r"placeholders <\|image_pad\|> for \d pictures"):
            processor.expand(text, pictures)


# -- the folder --------------------------------------------------------------------------------


def test_folders_of_transformers_are_read_as_it_wrote_them(tmp_path: Path) -> None:
    for options, kind in (
        (QWEN3, qwen.Qwen2VLImageProcessorPil),
        (QWEN25, qwen.Qwen2VLImageProcessorPil),
        (SMOLVLM, smolvlm.SmolVLMImageProcessorPil),
    ):
        given = load(tmp_path / "given", options, image_seq_len=4)
        theirs = kind.from_pretrained(tmp_path / "given")
        theirs.save_pretrained(tmp_path / "saved")
        written = json.loads((tmp_path / "saved" / "preprocessor_config.json").read_text())
        assert load(tmp_path / "saved", written, image_seq_len=4) == given
        nested = (
            tmp_path / "nested"
        )  # as transformers 5 saves a whole processor, and reads it first
        around = {"image_seq_len": 4, "image_processor": written}
        folder_of(nested, {"image_processor_type": "Another"}, around)
        assert PictureProcessor.from_folder(nested) == given


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    found = load(tmp_path, {"image_processor_type": "Qwen2VLImageProcessor"})
    theirs = qwen.Qwen2VLImageProcessorPil()
    assert isinstance(found, WholePictures)
    assert (found.min_pixels, found.max_pixels) == tuple(
        theirs.size[name] for name in ("shortest_edge", "longest_edge")
    )
    assert (found.patch, found.merge, found.frames) == (14, 2, 2)
    assert (found.mean, found.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    assert found.rescale_factor == theirs.rescale_factor and found.kernel == "bicubic"
    tiled = load(tmp_path, {"image_processor_type": "Idefics3ImageProcessor"})
    theirs = smolvlm.SmolVLMImageProcessorPil()
    assert isinstance(tiled, TiledPictures)
    assert tiled.longest_edge == theirs.size["longest_edge"] and tiled.kernel == "lanczos"
    assert tiled.tile == theirs.max_image_size["longest_edge"] and tiled.is_split
    assert (tiled.mean, tiled.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    assert tiled.tile_tokens == 169  # SmolVLMProcessor's


@pytest.mark.parametrize("size", [{"min_pixels": 100, "max_pixels": 9000}, None])
def test_older_names_of_sizes_are_known(size: dict[str, int] | None, tmp_path: Path) -> None:
    """transformers 4.45 wrote both; what stands outside `size` wins."""
    options = QWEN25 | {"min_pixels": 4000, "size": size}
    found = load(tmp_path, options)
    assert isinstance(found, WholePictures)
    assert (found.min_pixels, found.max_pixels) == (4000, 60_000)


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        (QWEN3, {"sharpen": 0.3}, r"sharpen is 0.3, must be left out: it is not known"),
        (QWEN3, {"crop_size": {"height": 8}}, "crop_size is"),
        (QWEN3, {"do_center_crop": True}, "do_center_crop is true, must be false"),
        (QWEN3, {"do_pad": True}, "do_pad is true, must be false"),
        (QWEN3, {"do_resize": False}, "do_resize is false, must be true"),
        (SMOLVLM, {"do_rescale": False}, "do_rescale is false, must be true"),
        (QWEN3, {"do_normalize": False}, "do_normalize is false, must be true"),
        (SMOLVLM, {"do_convert_rgb": False}, "do_convert_rgb is false, must be true"),
        (QWEN3, {"do_resize": 1}, "do_resize is 1, must be true or false"),
        (QWEN3, {"resample": 0}, r"resample is 0, must be one of 1 \(lanczos\)"),
        (QWEN3, {"size": {"height": 8, "width": 8}}, "must be whole numbers above 0 for shortest"),
        (QWEN3, {"size": {"shortest_edge": 8}}, "for shortest_edge, longest_edge"),
        (QWEN3, {"size": 224}, "size is 224"),
        (QWEN3, {"size": {"shortest_edge": 9, "longest_edge": 8}}, "pixels is 8, must be at least"),
        (SMOLVLM, {"size": {"longest_edge": 0}}, "above 0 for longest_edge"),
        (SMOLVLM, {"max_image_size": {"height": 8, "width": 8}}, "max_image_size is"),
        (QWEN3, {"patch_size": 0}, "patch_size is 0, must be a whole number above 0"),
        (QWEN3, {"merge_size": True}, "merge_size is true"),
        (QWEN3, {"image_mean": [0.5, 0.5]}, "image_mean is .*three numbers"),
        (QWEN3, {"image_std": [0.5, 0.0, 0.5]}, "image_std is .*above 0"),
        (QWEN3, {"rescale_factor": "1/255"}, "rescale_factor is"),
        (
            QWEN3,
            {"image_processor_type": "ViTImageProcessor"},
            "one of Qwen2VLImageProcessor, Smol",
        ),
        (QWEN3, {"image_processor_type": None}, 'image_processor_type is ""'),
    ],
)
def test_options_that_would_move_a_pixel_are_refused_by_name(
    options: dict[str, Any], change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said) as error:
        load(tmp_path, options | change)
    assert "preprocessor_config.json: " in str(error.value)


def test_a_folder_without_options_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"preprocessor_config.json does not exist or is empty"):
        PictureProcessor.from_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, not a list"):
        PictureProcessor.from_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        PictureProcessor.from_folder(tmp_path)
    with pytest.raises(ValueError, match=r"processor_config\.json: image_seq_len is 1\.5"):
        load(tmp_path, SMOLVLM, image_seq_len=1.5)


def test_the_fingerprint_changes_with_whatever_moves_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"resample": 1},
        {"image_mean": [0.5, 0.5, 0.4]},
        {"image_std": [0.5, 0.5, 0.4]},
        {"rescale_factor": 1 / 256},
        {"patch_size": 14},
        {"merge_size": 1},
        {"temporal_patch_size": 1},
        {"size": {"shortest_edge": 64 * 64, "longest_edge": 65_537}},
        {"size": {"shortest_edge": 64 * 65, "longest_edge": 65_536}},
    ]
    found = [load(tmp_path, QWEN3 | change).fingerprint for change in changes]
    tiles: list[dict[str, Any]] = [
        *({}, {"max_image_size": {"longest_edge": 60}}, {"do_image_splitting": False}),
        {"size": {"longest_edge": 128}},
    ]
    found += [load(tmp_path, SMOLVLM | change, **AROUND).fingerprint for change in tiles]
    for rule in ("BORDER_RULE", "RESIZE_RULE"):
        with monkeypatch.context() as patch:
            patch.setattr(f"nanoengine.vision.processor.{rule}", "another")
            found.append(load(tmp_path, QWEN3).fingerprint)
    assert len(set(found)) == len(found)
    again = QWEN3 | {"resample": 3, "image_mean": 0.5, "video_sampling": {"fps": 2}}
    assert load(tmp_path, again).fingerprint == found[0]


def test_pixels_of_another_form_are_refused(tmp_path: Path) -> None:
    processor = load(tmp_path, QWEN3)
    with pytest.raises(ValueError, match="have 4 channels: must be 3"):
        processor.process(np.zeros((8, 8, 4), np.uint8))
    with pytest.raises(ValueError, match="must be uint8"):
        processor.process(np.zeros((8, 8, 3)))
    with pytest.raises(ValueError, match="at most 200 times the other"):
        processor.process(np.zeros((1, 201, 3), np.uint8))
    with pytest.raises(ValueError, match="sides must be multiples of 32"):
        processor.pixel_values(np.zeros((1, 64, 48, 3), np.uint8))
