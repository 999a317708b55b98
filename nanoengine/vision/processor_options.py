"""The options of a picture processor, from the files of a model folder, each asked for by name.

    processor_config.json     the options under `image_processor`, as transformers 5 writes them
    preprocessor_config.json  the options, where there are none there
    tokenizer_config.json     the tokens that stand for pictures, where they have names of their own
    config.json               of tiles: the patches that the model makes of them, and merges

An option that nobody asked for may move pixels, so `finish` refuses it.
Next: processor.py (what they mean).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_AROUND, _OPTIONS = "processor_config.json", "preprocessor_config.json"
_TOKENIZER, _MODEL = "tokenizer_config.json", "config.json"

# Names of classes and layouts of arrays, and what is said about films: no pixel depends on them.
_HARMLESS = {
    *("image_processor_type", "processor_class", "feature_extractor_type", "auto_map"),
    *("_valid_processor_keys", "_valid_kwargs_names", "model_input_names", "default_to_square"),
    *("data_format", "device", "return_tensors", "disable_grouping", "return_row_col_info"),
    "video_sampling",
}


class PictureOptions:
    """The fields of one file. `ValueError` for a value of the wrong kind names field, file and
    rule; null is the same as no field."""

    def __init__(self, fields: Mapping[str, Any], file: Path) -> None:
        self._left = {name: value for name, value in fields.items() if value is not None}
        self._file = file

    def take_text(self, name: str, default: str) -> str:
        value = self._left.pop(name, default)
        if isinstance(value, dict):  # a token with its flags
            value = value.get("content")
        if not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def take_flag(self, name: str, default: bool) -> bool:
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def take_count(self, name: str, default: int) -> int:
        value = self._left.pop(name, default)
        if not _is_count(value):
            raise self.wrong(name, value, "a whole number above 0")
        return value

    def take_number(self, name: str, default: float) -> float:
        value = self._left.pop(name, default)
        if not _is_number(value) or value <= 0:
            raise self.wrong(name, value, "a number above 0")
        return float(value)

    def take_channels(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Three numbers; one stands for three."""
        value = self._left.pop(name, list(default))
        channels = value if isinstance(value, list) else [value] * 3
        if len(channels) != 3 or not all(map(_is_number, channels)):
            raise self.wrong(name, value, "three numbers, of red, green and blue")
        return tuple(map(float, channels))

    def take_size(
        self, name: str, default: Mapping[str, int], old_names: Mapping[str, str] | None = None
    ) -> Mapping[str, int]:
        """Whole numbers under the very names of `default`, or under older ones of these."""
        value = self._left.pop(name, default)
        is_size = isinstance(value, dict) and all(map(_is_count, value.values()))
        size = (
            {(old_names or {}).get(key, key): count for key, count in value.items()}
            if is_size
            else {}
        )
        if size.keys() != default.keys():
            raise self.wrong(name, value, f"whole numbers above 0 for {', '.join(default)}")
        return size

    def take_choice(self, name: str, default: int, choices: Mapping[int, str]) -> str:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or value not in choices:
            known = ", ".join(f"{number} ({choice})" for number, choice in choices.items())
            raise self.wrong(name, value, f"one of {known}")
        return choices[value]

    def require(self, name: str, only: bool, default: bool) -> None:
        """Take a switch that has one position here."""
        value = self.take_flag(name, default)
        if value is not only:
            raise self.wrong(name, value, f"{str(only).lower()}: nothing else is supported")

    def finish(self) -> None:
        """Refuse what nobody took."""
        unknown = sorted(self._left.keys() - _HARMLESS)
        if unknown:
            name = unknown[0]
            raise self.wrong(
                name, self._left[name], "left out: it is not known, and may move pixels"
            )

    def wrong(self, name: str, value: object, rule: str) -> ValueError:
        return ValueError(
            f"{self._file}: {name} is {json.dumps(value, default=str)}, must be {rule}"
        )


def read_options(path: str | Path) -> tuple[PictureOptions, PictureOptions]:
    """The options of the pictures, and what is said around them: the names of tokens,
    `image_seq_len`, and the model's `patch_size` and `scale_factor`. `ValueError` names the file
    that is missing or no JSON object."""
    folder = Path(path)
    around = _read_json(folder / _AROUND)
    file = folder / (_AROUND if around.get("image_processor") else _OPTIONS)
    fields = around.get("image_processor") or _read_json(file)
    if not isinstance(fields, dict) or not fields:
        raise ValueError(
            f"{file} does not exist or is empty: a model that sees has one in its folder; copy it "
            "from the model that this one was made from"
        )
    tokens = _read_json(folder / _TOKENIZER)
    extra = tokens.get("extra_special_tokens")
    named = {**tokens, **(extra if isinstance(extra, dict) else {})}
    model = _read_json(folder / _MODEL)
    vision = model.get("vision_config")
    patch = vision.get("patch_size") if isinstance(vision, dict) else None
    named |= {"patch_size": patch, "scale_factor": model.get("scale_factor")}
    return PictureOptions(fields, file), PictureOptions({**named, **around}, folder / _AROUND)


def _read_json(file: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(fields).__name__}")
    return fields


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
