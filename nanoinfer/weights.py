"""New weights into a serving model, in place: all or nothing.

Names and shapes are all checked before the first write (`nanoengine.model.hf.load_state`), and
values for NaN and infinity too: an engine would go on sampling from those without an error.
Left out: transports between processes; whoever brings tensors brings an iterator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nanoengine.model.hf import load_state
from nanoengine.model.transformer import Transformer


def update_weights(model: Transformer, state: Iterable[tuple[str, Tensor]]) -> None:
    """Write Hugging Face tensors into `model` and repack it. `ValueError` names what is missing,
    unknown, of the wrong shape or not finite, and then the old weights are untouched."""
    load_state(model, _finite(state))


def _finite(state: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state:
        # The extremes are finite if and only if all values are: NaN propagates to both.
        if tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():
            raise ValueError(f"tensor {name!r} holds NaN or infinity; nothing was loaded")
        yield name, tensor
