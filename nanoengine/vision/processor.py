"""A model's own way to take in pictures, read from its folder, equal to that of `transformers`.

    processor = PictureProcessor.from_folder("Qwen3-VL-4B-Instruct")
    taken = processor.process(read_picture(data))      # uint8 RGB of the size that the model takes
    text = processor.expand(prompt, [taken])           # its placeholders, before tokenising
    values = processor.pixel_values(taken.pixels)      # float32, what the tower is given

Both engines take the same resized bytes and call the same `pixel_values`, so their numbers agree to
the bit. Two kinds are known: Qwen's (Qwen2-VL, Qwen2.5-VL, Qwen3-VL), which keeps a picture whole
at nearly its own size, and that of SmolVLM and Idefics 3, which cuts it into tiles and shows it
once more as a whole. An option that would move a pixel and is not known is refused by name.
Left out: video; padding, which does nothing to one picture; names of tokens that text may spell,
which are the tokenizer's to guard (text/special_guard.py).
Next: picture_sizes.py (how large), pixel_values.py (the numbers), resize.py.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from nanoengine.vision.picture_sizes import smart_resize, tile_sizes
from nanoengine.vision.pictures import BORDER_RULE
from nanoengine.vision.pixel_values import level_values, patch_rows
from nanoengine.vision.processor_options import PictureOptions, read_options
from nanoengine.vision.resize import RESIZE_RULE, check_pixels, resize

_RESAMPLE = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_LANCZOS, _BICUBIC = 1, 3
_OLD_NAMES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, eq=False)
class ProcessedPicture:
    """A picture as a model takes it."""

    pixels: np.ndarray
    """uint8 RGB [T, H, W, 3]: the picture, or its tiles by row and then the whole."""

    grid: tuple[int, int, int]
    """(1, rows, columns) of patches; of tiles (T, rows, columns), (1, 0, 0) where it is one."""

    patches: tuple[int, int, int]
    """(1, rows, columns) of patches of each of its T parts, as the tower takes them."""

    num_tokens: int
    """Placeholders in `text`, each a row that the tower fills; of each part equally many."""

    text: str
    """What stands for the picture instead of its one placeholder in a rendered chat."""


@dataclass(frozen=True, kw_only=True)
class PictureProcessor(ABC):
    """The part that both kinds share. `from_folder` makes the one that a folder asks for."""

    kernel: str
    """How pictures are resized, one of resize.py's."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of each channel, in units of a level times `rescale_factor`."""

    rescale_factor: float
    placeholder: str
    """The token that a template prints for a picture, and that `process` repeats."""

    patch: int
    """Pixels of a patch's sides."""

    @staticmethod
    def from_folder(path: str | Path) -> PictureProcessor:
        """Read a Hugging Face model folder. `ValueError` names a missing file, or an option and
        its file that are not supported."""
        options, around = read_options(path)
        name = options.take_text("image_processor_type", "")
        kind = _KINDS.get(name.removesuffix("Fast").removesuffix("Pil"))
        if kind is None:
            raise options.wrong("image_processor_type", name, f"one of {', '.join(_KINDS)}")
        processor = kind.from_options(options, around)
        options.finish()
        return processor

    @abstractmethod
    def process(self, pixels_HW3: np.ndarray) -> ProcessedPicture:
        """Resize uint8 RGB [H, W, 3]. `ValueError` for other pixels, or a shape that the model
        refuses."""

    @abstractmethod
    def num_tokens(self, height: int, width: int) -> int:
        """The placeholders that `process` would make of a picture of those sides, in pixels, which
        may have been turned. `ValueError` for a shape that the model refuses."""

    @abstractmethod
    def pixel_values(self, pixels_THW3: np.ndarray) -> np.ndarray:
        """The numbers of a processed picture's `pixels`, or of some of its parts: patches as rows
        [P, numbers of a patch], float32, in the order in which they are merged (pixel_values.py).
        """

    def size_of(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        """Width and height in pixels of what a span of that `grid` of patches shows, as the model
        takes it: a picture, or one of its tiles."""
        return grid[2] * self.patch, grid[1] * self.patch

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits, which change with anything that moves a number of a picture: the
        rules and options by which files are read, resized and turned into numbers."""
        moving = asdict(self) | {"kind": type(self).__name__}
        rules = {"border": BORDER_RULE, "resize": RESIZE_RULE, **moving}
        return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()

    def expand(self, text: str, pictures: Sequence[ProcessedPicture]) -> str:
        """`text` with the `text` of the k-th picture in place of the k-th placeholder. This comes
        before tokenising: newlines between tiles may merge with those of the text.

        `ValueError` where there are more or fewer placeholders than pictures.
        """
        first, *rest = text.split(self.placeholder)
        if len(rest) != len(pictures):
            raise ValueError(
                f"{len(rest)} placeholders {self.placeholder} for {len(pictures)} pictures: a chat "
                "has one for each; give its messages one image part a picture"
            )
        return first + "".join(one.text + after for one, after in zip(pictures, rest, strict=True))

    def _values(self) -> np.ndarray:
        return level_values(self.mean, self.std, self.rescale_factor)


@dataclass(frozen=True, kw_only=True)
class WholePictures(PictureProcessor):
    """Qwen's: a picture near its own size, in patches, of which `merge` times `merge` make a
    token."""

    min_pixels: int
    max_pixels: int
    merge: int
    frames: int

    @classmethod
    def from_options(cls, options: PictureOptions, around: PictureOptions) -> WholePictures:
        default = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # numbers of pixels
        size = options.take_size("size", default, old_names=_OLD_NAMES)
        options.require("do_pad", False, default=False)
        found = cls(
            **_shared(options, _BICUBIC, _CLIP_MEAN, _CLIP_STD),
            placeholder=around.take_text("image_token", "<|image_pad|>"),
            min_pixels=options.take_count("min_pixels", size["shortest_edge"]),
            max_pixels=options.take_count("max_pixels", size["longest_edge"]),
            patch=options.take_count("patch_size", 14),
            merge=options.take_count("merge_size", 2),
            frames=options.take_count("temporal_patch_size", 2),
        )
        if found.min_pixels > found.max_pixels:
            rule = f"at least the smallest, {found.min_pixels}"
            raise options.wrong("the largest number of pixels", found.max_pixels, rule)
        return found

    def process(self, pixels_HW3: np.ndarray) -> ProcessedPicture:
        _check_rgb(pixels_HW3)
        height, width = self._sides(*pixels_HW3.shape[:2])
        grid = (1, height // self.patch, width // self.patch)
        num_tokens = math.prod(grid) // self.merge**2
        resized = resize(pixels_HW3, height, width, self.kernel)
        text = self.placeholder * num_tokens
        return ProcessedPicture(resized[None], grid, grid, num_tokens, text)

    def num_tokens(self, height: int, width: int) -> int:
        return math.prod(self._sides(height, width)) // (self.patch * self.merge) ** 2

    def _sides(self, height: int, width: int) -> tuple[int, int]:
        return smart_resize(
            height,
            width,
            factor=self.patch * self.merge,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )

    def pixel_values(self, pixels_THW3: np.ndarray) -> np.ndarray:
        (pixels_HW3,) = pixels_THW3
        _check_multiple(pixels_THW3, self.patch * self.merge)
        sizes = {"patch": self.patch, "merge": self.merge, "frames": self.frames}
        return patch_rows(pixels_HW3, self._values(), **sizes)


@dataclass(frozen=True, kw_only=True)
class TiledPictures(PictureProcessor):
    """SmolVLM's and Idefics 3's: square tiles of `tile` pixels, each `tile_tokens` tokens, of which
    `merge` times `merge` patches make one."""

    longest_edge: int
    tile: int
    is_split: bool
    tile_tokens: int
    merge: int
    around: str
    """The token before each tile and after the last one."""

    whole: str
    """The token that says that the whole picture follows."""

    @classmethod
    def from_options(cls, options: PictureOptions, around: PictureOptions) -> TiledPictures:
        size = options.take_size("size", {"longest_edge": 4 * 364})
        tile = options.take_size("max_image_size", {"longest_edge": 364})
        is_split = options.take_flag("do_image_splitting", True)
        options.take_flag("do_pad", True)  # of pictures in a batch; tiles have one size
        found = cls(
            **_shared(options, _LANCZOS, _HALF, _HALF),
            placeholder=around.take_text("image_token", "<image>"),
            around=around.take_text("fake_image_token", "<fake_token_around_image>"),
            whole=around.take_text("global_image_token", "<global-img>"),
            longest_edge=size["longest_edge"],
            tile=tile["longest_edge"],
            is_split=is_split,
            tile_tokens=around.take_count("image_seq_len", 169),
            patch=around.take_count("patch_size", 14),
            merge=around.take_count("scale_factor", 2),
        )
        if found.side % found.merge or (found.side // found.merge) ** 2 != found.tile_tokens:
            rule = (
                f"what {found.side} x {found.side} patches of a tile of {found.tile} pixels make, "
                f"{found.merge} x {found.merge} a token: patch_size, scale_factor of config.json"
            )
            raise around.wrong("image_seq_len", found.tile_tokens, rule)
        return found

    @property
    def side(self) -> int:
        """Patches of a side of a tile; pixels that are left over are not looked at."""
        return self.tile // self.patch

    def process(self, pixels_HW3: np.ndarray) -> ProcessedPicture:
        _check_rgb(pixels_HW3)
        sizes = tile_sizes(*pixels_HW3.shape[:2], longest_edge=self.longest_edge, tile=self.tile)
        fitted = resize(pixels_HW3, *sizes.fitted, self.kernel)
        side, rows, columns = self.tile, sizes.rows, sizes.columns
        tiles: list[np.ndarray] = []
        if self.is_split:
            fitted = resize(fitted, *sizes.whole, self.kernel)
            cut = fitted[: rows * side, : columns * side].reshape(rows, side, columns, side, 3)
            tiles = list(cut.swapaxes(1, 2).reshape(rows * columns, side, side, 3))
        else:
            rows = columns = 0
        tiles.append(resize(fitted, side, side, self.kernel))
        num_tokens = len(tiles) * self.tile_tokens
        grid, patches = (len(tiles), rows, columns), (1, self.side, self.side)
        text = self._text(rows, columns)
        return ProcessedPicture(np.stack(tiles), grid, patches, num_tokens, text)

    def num_tokens(self, height: int, width: int) -> int:
        sizes = tile_sizes(height, width, longest_edge=self.longest_edge, tile=self.tile)
        num_tiles = sizes.rows * sizes.columns if self.is_split else 0
        return (num_tiles + 1) * self.tile_tokens

    def pixel_values(self, pixels_THW3: np.ndarray) -> np.ndarray:
        _check_multiple(pixels_THW3, self.tile)
        seen, values = self.side * self.patch, self._values()
        sizes = {"patch": self.patch, "merge": self.merge, "frames": 1}
        return np.concatenate(
            [patch_rows(tile[:seen, :seen], values, **sizes) for tile in pixels_THW3]
        )

    def _text(self, rows: int, columns: int) -> str:
        tokens = self.placeholder * self.tile_tokens
        lines = [
            "".join(f"{self.around}<row_{r}_col_{c}>{tokens}" for c in range(1, columns + 1)) + "\n"
            for r in range(1, rows + 1)
        ]
        whole = f"{self.around}{self.whole}{tokens}{self.around}"
        return "".join(lines) + ("\n" if lines else "") + whole


_KINDS: dict[str, type[WholePictures] | type[TiledPictures]] = {
    "Qwen2VLImageProcessor": WholePictures,
    "SmolVLMImageProcessor": TiledPictures,
    "Idefics3ImageProcessor": TiledPictures,
}


class _Shared(TypedDict):
    kernel: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float


def _shared(
    options: PictureOptions, resample: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> _Shared:
    """The options of both kinds, with the defaults of one."""
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        options.require(name, True, default=True)
    options.require("do_center_crop", False, default=False)
    found: _Shared = {
        "kernel": options.take_choice("resample", resample, _RESAMPLE),
        "mean": options.take_channels("image_mean", mean),
        "std": options.take_channels("image_std", std),
        "rescale_factor": options.take_number("rescale_factor", 1 / 255),
    }
    if min(found["std"]) <= 0:
        raise options.wrong("image_std", list(found["std"]), "above 0: it is divided by")
    return found


def _check_rgb(pixels_HW3: np.ndarray) -> None:
    check_pixels(pixels_HW3)
    if pixels_HW3.shape[2] != 3:
        raise ValueError(
            f"pixels have {pixels_HW3.shape[2]} channels: must be 3, red, green and blue; read the "
            "file with read_picture"
        )


def _check_multiple(pixels_THW3: np.ndarray, factor: int) -> None:
    height, width = pixels_THW3.shape[1:3]
    if height % factor or width % factor:
        raise ValueError(
            f"pixels are {height}x{width}: sides must be multiples of {factor}; give what "
            "`process` made"
        )
