"""New weights into a serving model, in place: all or nothing.

Names and shapes are all checked before the first write (`nanoengine.model.hf.load_state`), and
values for NaN and infinity too: an engine would go on sampling from those without an error.
Left out: transports between processes; whoever brings tensors brings an iterator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nanoengine.model.device import to_host
from nanoengine.model.hf import load_state
from nanoengine.model.transformer import Transformer


def update_weights(model: Transformer, state: Iterable[tuple[str, Tensor]]) -> None:
    """Write Hugging Face tensors into `model` and repack it. `ValueError` names what is missing,
    unknown, of the wrong shape or not finite, and then the old weights are untouched."""
    load_state(model, _finite(state))


def _finite(state: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """All of `state`. What is not finite is told after the last one, and still before the first
    write: a GPU is asked once."""
    names: list[str] = []
    is_finite: list[Tensor] = []
    for name, tensor in state:
        if tensor.numel():
            # The extremes are finite if and only if all values are: NaN propagates to both.
            names.append(name)
            is_finite.append(torch.isfinite(torch.stack(tensor.aminmax())).all())
        yield name, tensor
    for name, flag in zip(names, to_host(is_finite), strict=True):
        if not flag:
            raise ValueError(f"tensor {name!r} holds NaN or infinity; nothing was loaded")
