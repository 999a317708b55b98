"""The tensors of a vision tower under Hugging Face's names, by the table in towers.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch import Tensor, nn

from nanoengine.vision.tower import Tower


def tower_views(tower: Tower) -> dict[str, Tensor]:
    """Every name, as transformers 5 writes it, with the view of our parameter that holds it, or of
    the rows that do; writing to the view writes to the tower."""
    return {name: view for name, view, _ in _named(tower)}


def frozen_names(tower: Tower) -> list[str]:
    """The names of what has no gradient, in their order."""
    return [name for name, _, parameter in _named(tower) if not parameter.requires_grad]


def _named(tower: Tower) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
    """Yield each name, its view and our parameter."""
    config = tower.config
    family = config.tower
    for name, parameter in tower.named_parameters():
        view = parameter.detach()
        if name == "patches.weight":  # the weight of a convolution: a patch meets all of it once
            view = view.view(-1, *config.patch_shape)
        if name in family.elsewhere:
            yield family.elsewhere[name], view, parameter
            continue
        parts = (family.names.get(part, part) for part in name.split("."))
        theirs = [*product(*((one,) if isinstance(one, str) else one for one in parts))]
        for one, rows in zip(theirs, view.chunk(len(theirs)), strict=True):
            yield family.prefix + ".".join(one), rows, parameter
