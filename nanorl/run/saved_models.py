"""The models that a name on the command line stands for: a run's folder, or a model's.

Of a run they are what it trained and what it began with. While it goes on, or where it was stopped,
the trained one is its newest checkpoint, read beside the run and written nowhere into it.
Left out: older checkpoints, and a critic's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanoengine.adapters.lora_adapter import LoraAdapter, LoraBase
from nanoengine.command_line import gives_back
from nanoengine.formats.hf import load_model, save_model
from nanoengine.formats.sources import HUB, near, resolve_model
from nanoengine.optim import DTYPES
from nanoengine.state.checkpoint import (
    latest_checkpoint,
    open_checkpoint,
)
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.observability.report.evaluation import Evaluation
from nanorl.options.parts import model_folder
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import run_tokenizer
from nanorl.options.trust import readable
from nanorl.run.continuation import saved_places
from nanorl.run.cursor import BEST, CHECKPOINTS, START, WARMING_UP, run_and_place

STAGES = ("untrained", "before", "after", "best")


@dataclass(frozen=True, kw_only=True)
class SavedModels:
    """The place of a name's models. `run` has the options of the run, None of a plain model."""

    name: str
    place: Path
    """A Hugging Face folder, or a checkpoint's."""
    is_checkpoint: bool = False
    run: RunConfig | None = None
    what: str = "the run has not finished; its newest one"
    """Says of a checkpoint which one it is."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the run computes; fp32 for a plain model, as the server."""
        return DTYPES["fp32" if self.run is None else self.run.dtype]

    def describe(self) -> str:
        """The trained model in words."""
        if self.is_checkpoint:
            return f"{self.place} (a checkpoint: {self.what})"
        return str(self.place)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """The trained model as a Hugging Face folder. A checkpoint's is gone at the end, which may
        be SIGTERM."""
        if not self.is_checkpoint:
            yield self.place
            return
        assert self.run is not None, "a model that is no run's has no checkpoint"
        with gives_back(), tempfile.TemporaryDirectory(prefix="nanorl-model-") as scratch:
            folder = Path(scratch) / "model"
            _export(self.place, self.base(), folder, self.run)
            yield folder

    def base(self) -> Path:
        """The Hugging Face folder of the model that the run began with."""
        if self.run is None:
            raise ValueError(
                f"{self.name} is a model, not a run: what it was before is not known; name that "
                "model with --base"
            )
        return model_folder(self.run)


def find_models(name: str) -> SavedModels:
    """The models of a run's folder, of a Hugging Face folder, or of a model's name. RUN:before is
    what RL began with, RUN:untrained what the run began with, RUN:after what came of it, RUN:best
    what its evaluations while RL went on found best, RUN@7 the checkpoint after seven steps of RL.

    `ValueError` where there is no such thing, or where a run has not saved anything yet.
    """
    folder, stage = _folder_and_stage(name)
    if _options(folder) is None:
        if folder.parent.name == "runs" and not folder.exists():  # where runs go, and no hub's user
            raise ValueError(
                f"{name}: there is no such run{near(folder)}; name a run's folder or a model's, or "
                f"a model of the hub as {HUB}OWNER/NAME"
            )
        return SavedModels(name=name, place=resolve_model(name))
    run = read_run(folder)
    if stage == "before":
        return _before_rl(name, folder, run)
    if stage == "best":
        return _best(name, folder, run)
    if stage.startswith("@"):
        return _after_steps(name, folder, run, int(stage[1:]))
    if stage == "untrained":
        return SavedModels(name=name, place=model_folder(run), run=run)
    trained = folder / "model-trained"
    if trained.is_dir():
        return SavedModels(name=name, place=trained, run=run)
    checkpoint = latest_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        raise ValueError(
            f"{folder}: this run has neither a model-trained nor a checkpoint yet; wait for its "
            "first checkpoint, or name a model"
        )
    return SavedModels(name=name, place=checkpoint, is_checkpoint=True, run=run)


def evaluated_models(options: RunConfig, title: str) -> SavedModels:
    """The models that a `nanorl eval` played, whose options name a folder. A checkpoint's was
    written for that evaluation alone: it is found by `title`, the name that was evaluated."""
    folder = str(options.model)
    return find_models(folder if Path(folder).exists() else title)


def _folder_and_stage(name: str) -> tuple[Path, str]:
    """RUN:STAGE or RUN@7 apart, as (RUN, "STAGE") or (RUN, "@7"), where RUN is a run's folder; a
    folder may have a colon or an @ in its name."""
    folder = Path(name).expanduser()
    before, step = run_and_place(name)
    run = Path(before).expanduser()
    if step.isdigit() and _options(run) is not None:
        return run, f"@{step}"
    before, colon, stage = name.rpartition(":")
    run = Path(before).expanduser()
    if not colon or folder.exists() or _options(run) is None:
        return folder, ""
    if stage not in STAGES:
        raise ValueError(f"{name}: {before} has no stage {stage!r}; there are {', '.join(STAGES)}")
    return run, stage


def _before_rl(name: str, folder: Path, run: RunConfig) -> SavedModels:
    """The models that RL began with: its checkpoint's, or the model if no warm start changed it."""
    start = latest_checkpoint(folder / START)
    if start is not None:
        what = "what RL began with"
        return SavedModels(name=name, place=start, is_checkpoint=True, run=run, what=what)
    if run.warm_start.steps or run.fork:
        raise ValueError(
            f"{name}: the run has not kept what RL began with (--keep-start False), or RL has not "
            f"begun; there is {folder}:untrained"
        )
    return SavedModels(name=name, place=model_folder(run), run=run)


def _best(name: str, folder: Path, run: RunConfig) -> SavedModels:
    """The models of the best evaluation while RL goes on."""
    best = latest_checkpoint(folder / BEST)
    if best is None:
        raise ValueError(
            f"{name}: no evaluation while RL went on has kept a best checkpoint; train with "
            "--evaluation.every N"
        )
    what = "the best of its evaluations"
    return SavedModels(name=name, place=best, is_checkpoint=True, run=run, what=what)


def _after_steps(name: str, folder: Path, run: RunConfig, num_steps: int) -> SavedModels:
    """The models of the checkpoint after so many steps of RL, if it is still there."""
    found = {
        cursor.rl_steps_done: one
        for one, cursor in saved_places(folder, run, (CHECKPOINTS, BEST, START))
        if cursor.phase not in WARMING_UP
    }
    if num_steps not in found:
        there = ", ".join(f"@{step}" for step in sorted(found)) or "none"
        raise ValueError(
            f"{name}: no checkpoint after {num_steps} steps of RL; there are: {there}. A run keeps "
            "the newest ones (--keep-checkpoints), what RL began with, and the best"
        )
    place, what = found[num_steps], f"after {num_steps} steps of RL"
    return SavedModels(name=name, place=place, is_checkpoint=True, run=run, what=what)


def read_run(folder: Path) -> RunConfig:
    """The options of a run, with `out` where its folder lies now. `ValueError` if it is none."""
    options = _options(folder)
    if options is None:
        raise ValueError(f"{folder}: is not a run's folder, which has the run's config.json")
    # As a resumed run: its model is there and must not be built again.
    return replace(RunConfig.from_json(readable(options)), out=folder, resume=True)


def named_options(folder: Path) -> dict[str, Any]:
    """The options that lie in the folder of a run or of an evaluation, as they are written there.
    `ValueError` if it is neither."""
    options = _options(folder)
    if options is None and (folder / "eval.json").is_file():
        options = Evaluation.read(folder / "eval.json").about.get("options")
    if options is None:
        raise ValueError(
            f"{folder}: is not the folder of a run or of an evaluation: it has no config.json"
        )
    return options


def read_tokenizer(folder: Path) -> ChatTokenizer:
    """The tokenizer of a run's model, as the run has it. `ValueError` if the folder is no run's."""
    config = read_run(folder)
    trained = folder / "model-trained"
    return run_tokenizer(config, trained if trained.is_dir() else model_folder(config))


def _options(folder: Path) -> dict[str, Any] | None:
    """The options of a run, None of any other folder: a model's config.json knows no preset."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is not JSON ({error}); is that a run's or a model's?") from None
    return data if isinstance(data, dict) and "preset" in data else None


def _export(checkpoint: Path, base: Path, folder: Path, run: RunConfig) -> None:
    """Write the weights of a run's checkpoint in the run's dtype, as in model-trained, around the
    configuration and tokenizer of `base`: rounded masters, or `base` with the adapter merged."""
    saved = open_checkpoint(checkpoint)
    model = load_model(base, DTYPES[run.dtype], is_int8=run.lora.is_int8)
    adapter = LoraAdapter(LoraBase(model), run.lora) if run.lora.rank else None
    with torch.no_grad():
        for name, parameter in (adapter or model).named_parameters():
            parameter.copy_(saved.read(f"master.{name}"))
    if adapter is not None:
        adapter.activate()
    save_model(model, folder, base)
