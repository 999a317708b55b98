"""`ViewedRun`: the folder of a run, or of `nanorl eval`, as the viewer reads it.

    run = ViewedRun("tiny-seed0", Path("runs/tiny-seed0"))
    with run.open("after") as store:
        entries, total = store.page(run.selection("after", outcome="wrong"))

A run has phases: "rl" is the training, the others are its evaluations. Tokens become text with the
tokenizer of the run's own model, read when it is first needed, because a run that has just begun
may not have its model yet.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanoengine.state.run_folder import LOCK
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.inspection.viewer.stored import Selection
from nanorl.observability.report.summary import EVALUATIONS
from nanorl.observability.results import PHASES
from nanorl.observability.store import EmptyStoreError, RolloutStore, StoreError, open_for_reading
from nanorl.observability.trajectories.base import Trajectory, TrajectoryReader
from nanorl.observability.trajectories.run_parsers import find_parsers
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import PICTURES, run_tokenizer
from nanorl.options.store_address import EVALUATIONS_FILE, TRAINING_FILE
from nanorl.options.trust import readable, require
from nanorl.run.saved_models import evaluated_models, named_options, read_run, read_tokenizer
from nanorl.shown_pictures import RunPictures
from nanorl.types import Rollout

TRAINING, EVALUATION = "rl", "evaluation"
TITLES: Mapping[str, str] = MappingProxyType(
    {TRAINING: "Training", EVALUATION: "Evaluation", **EVALUATIONS}
)
"""Of the phases; `evaluation` is the only one of a folder of `nanorl eval`."""
_WATCHED = (
    *(TRAINING_FILE, f"{TRAINING_FILE}-wal", EVALUATIONS_FILE, f"{EVALUATIONS_FILE}-wal"),
    *("metrics.jsonl", "summary.json", "history.jsonl", "eval.json"),
)
_GOES_ON_S = 60.0
"""A run that wrote something so lately, and has not said that it ended, is taken to go on."""


def find_runs(folders: Sequence[Path]) -> dict[str, ViewedRun]:
    """The runs by their names, which are those of their folders, told apart where they are alike.
    ValueError for a folder that is none."""
    runs: dict[str, ViewedRun] = {}
    for folder in folders:
        place = folder.expanduser().resolve()
        if not ((place / "config.json").is_file() or (place / "eval.json").is_file()):
            raise ValueError(
                f"{folder}: is neither a run's folder, which has the run's config.json, nor one of "
                "nanorl eval, which has an eval.json"
            )
        alike = sum(run.folder.name == place.name for run in runs.values())
        name = f"{place.name} ({alike + 1})" if alike else place.name
        runs[name] = ViewedRun(name, place)
        runs[name].check()
    return runs


class ViewedRun:
    """One folder. May be used from several threads."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.notes: list[str] = []
        """What is not as it should be, for people."""
        self._lock = threading.Lock()

    @property
    def is_evaluation(self) -> bool:
        return not (self.folder / "config.json").is_file()

    def check(self) -> None:
        """ValueError if the folder's file is not what its name says."""
        if not self.is_evaluation:
            read_run(self.folder)
        elif "about" not in self._json("eval.json"):
            raise ValueError(f"{self.folder / 'eval.json'}: nanorl eval did not write it")

    @cached_property
    def _store(self) -> str:
        """The address of its rollouts; empty if they are in its folder."""
        if self.is_evaluation:
            return ""
        require(named_options(self.folder), self.folder, ["store"])
        return read_run(self.folder).store

    # -- what there is ---------------------------------------------------------------------------

    def phases(self) -> list[str]:
        """Those of which rollouts are stored, in the order in which they were played."""
        if self.is_evaluation:
            return [EVALUATION]
        found = []
        if self._store or (self.folder / TRAINING_FILE).is_file():
            found.append(TRAINING)
        with suppress(EmptyStoreError):  # the run is just making it
            if (self.folder / EVALUATIONS_FILE).is_file():
                with open_for_reading(self.folder / EVALUATIONS_FILE) as store:
                    found += [PHASES[step] for step in {row.step for row in store.tally()}]
        return sorted(found, key=lambda phase: PHASES.index(phase))  # type: ignore[arg-type]

    def open(self, phase: str) -> RolloutStore:
        """The store of a phase. ValueError for a phase that there is not."""
        if phase not in TITLES or (phase == EVALUATION) != self.is_evaluation:
            raise ValueError(f"phase {phase!r}: {self.name} has {', '.join(self.phases())}")
        if phase not in EVALUATIONS and self._store:
            return open_for_reading(self._store)
        file = self.folder / (EVALUATIONS_FILE if phase in EVALUATIONS else TRAINING_FILE)
        if not file.is_file():
            raise StoreError(f"{file}: is not there yet: no rollout of it was stored")
        return open_for_reading(file)

    def selection(self, phase: str, **options: Any) -> Selection:
        """Rollouts of a phase. Evaluations lie in one file, each under the number of its phase."""
        if phase in EVALUATIONS:
            number = PHASES.index(phase)  # type: ignore[arg-type]
            options["steps"] = (number, number)
        return Selection(**options)

    def summary(self) -> dict[str, Any]:
        """summary.json, which a run writes when it ends or is stopped; {} before that."""
        return self._json("summary.json")

    def status(self) -> str:
        """finished, stopped in phase rl, goes on, or that nobody knows."""
        if self.is_evaluation:
            return "finished"
        if _is_locked(self.folder / LOCK):
            return "goes on"
        times = self._times()
        if times.get("summary.json", 0.0) > times.get("history.jsonl", 0.0):  # not resumed since
            return str(self.summary().get("status", "ended"))
        quiet_s = time.time() - max(times.values(), default=0.0)
        return "goes on" if quiet_s < _GOES_ON_S else f"no news for {_spoken(quiet_s)}"

    def version(self) -> str:
        """Changes whenever the run has written something that can be viewed."""
        return "-".join(f"{changed:.3f}" for changed in self._times().values())

    def _times(self) -> dict[str, float]:
        found = {}
        for name in _WATCHED:
            try:
                found[name] = (self.folder / name).stat().st_mtime
            except FileNotFoundError:
                continue
        return found

    def _json(self, name: str) -> dict[str, Any]:
        try:
            data = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ValueError(f"{self.folder / name}: is not JSON ({error})") from None
        return data if isinstance(data, dict) else {}

    # -- tokens as text --------------------------------------------------------------------------

    def decode(self, ids: list[int]) -> str:
        """Ids as text, special tokens included."""
        with self._lock:
            return self.tokenizer.decode(ids)

    @property
    def pictures(self) -> RunPictures | None:
        """Those that its model was shown; None of a model that reads text. They lie in this folder,
        wherever its options say that it was."""
        with self._lock:
            found = RunPictures.of(self.tokenizer)
        return None if found is None else replace(found, folder=self.folder / PICTURES)

    def trajectory(self, rollout: Rollout, *, step: int, phase: str) -> Trajectory:
        """The rollout as messages, turns and calls."""
        with self._lock:
            return self._reader.read(rollout, step=step, phase=phase)

    @cached_property
    def _config(self) -> RunConfig:
        if not self.is_evaluation:
            return read_run(self.folder)
        options = self._json("eval.json")["about"].get("options")
        if not options:
            raise ValueError(
                f"{self.folder}: its eval.json does not say with which options it was played; an "
                "evaluation of today's version does"
            )
        return RunConfig.from_json(readable(options))

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """That of the model whose rollouts it has."""
        if not self.is_evaluation:
            return read_tokenizer(self.folder)
        played = evaluated_models(self._config, self._json("eval.json")["title"])
        return run_tokenizer(self._config, played.base() if played.is_checkpoint else played.place)

    @cached_property
    def _reader(self) -> TrajectoryReader:
        parsers = find_parsers(self._config, self.tokenizer, self.notes.append)
        return TrajectoryReader(self.tokenizer, parsers)


def _is_locked(file: Path) -> bool:
    """Say whether a process that can be seen from here holds the lock of a run. The kernel's list
    is read for it: to try the lock would hold it for a moment."""
    try:
        inode, held = file.stat().st_ino, Path("/proc/locks").read_text(encoding="ascii")
    except OSError:  # no lock, or a system without that list
        return False
    return any(" FLOCK " in line and f":{inode} " in line for line in held.splitlines())


def _spoken(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds // 60:.0f} minutes"
