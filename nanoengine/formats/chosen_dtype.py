"""The dtype that a model is loaded in where nobody names one: the folder's own.

config.json says it (`dtype`, before transformers 5 `torch_dtype`); where it does not, the tensors
do. fp16, in which there are no kernels here, becomes fp32, which holds each of its numbers.

Left out: dtypes of parts of a model.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from nanoengine.formats.hf import read_state

AUTO = "auto"
_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "float16": torch.float32,
}
_NAMES = ("float32", "bfloat16")


def chosen_dtype(given: torch.dtype | str, folder: str | Path) -> torch.dtype:
    """`given`, which may be the name of one, or `auto`: what the folder is in. `ValueError` for a
    name that is none, or a folder that does not exist."""
    if isinstance(given, torch.dtype):
        return given
    if given == AUTO:
        return stored_dtype(folder)
    if given not in _NAMES:
        raise ValueError(f"dtype={given!r}: must be {', '.join(_NAMES)} or {AUTO}")
    return _BY_NAME[given]


def stored_dtype(folder: str | Path) -> torch.dtype:
    """The dtype that the folder's config.json names, else that of its first float tensor; fp32 for
    fp16."""
    file = Path(folder) / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}; give a Hugging Face model folder") from None
    said = fields.get("dtype") or fields.get("torch_dtype") if isinstance(fields, dict) else None
    if said is None:
        floats = (x.dtype for _, x in read_state(folder) if x.is_floating_point())
        said = str(next(floats, torch.float32))
    name = str(said).removeprefix("torch.")
    if name not in _BY_NAME:
        raise ValueError(
            f"{file}: dtype={said!r}: no model runs in it; give dtype {' or '.join(_NAMES)}"
        )
    return _BY_NAME[name]
