"""New weights that somebody brings as tensors: into the model in place, all of them or none."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from nanoengine.formats.hf import load_state
from nanoengine.model.transformer import Transformer


def load_weights(
    model: Transformer, state: Iterable[tuple[str, Tensor]], *, is_finite: bool = False
) -> None:
    """Write Hugging Face tensors into the model and repack it, quantised copies included.
    `ValueError` names a tensor that does not fit or is not finite; then nothing was written."""
    load_state(model, state, is_finite=is_finite)
