"""A run's pictures, for the models of all its roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanorl.agents.kit import Kit
from nanorl.distributed.roles.shared_folder import require_folder


def give_sight(model: Any, folder: Path, pictures: Path | None, kit: Kit | None = None) -> None:
    """Let a model see the pictures in a folder that all roles share, made ready by the processor of
    its own folder; nothing, without one: it reads text. Where agents play in the same process, a
    picture that their `kit` has decoded is not decoded again."""
    if pictures is None:
        return
    # here: runs of text import nothing of it
    from nanoengine.vision.picture_store import PictureStore
    from nanoengine.vision.processor import PictureProcessor
    from nanoengine.vision.sight import Sight

    if kit is None:
        store = PictureStore(pictures, PictureProcessor.from_folder(folder))
    else:
        store = kit.tokenizer.store  # type: ignore[attr-defined]  # of a model that sees
    model.sight = Sight(model, store)


def share_sight(model: Any, folder: Path, pictures: Path | None) -> None:
    """As `give_sight`, in a process that may be on another machine than the one in which pictures
    are kept. `ValueError` where their folder is not there, which the driver made."""
    if pictures is not None:
        require_folder(pictures)
    give_sight(model, folder, pictures)
