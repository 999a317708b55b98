"""TensorBoard's event files of a run, a folder for each part of it.

    tensorboard/                    the steps of RL (metrics.py)
    tensorboard/warm_start/         the steps of the warm start, counted by themselves
    tensorboard/evaluation/before/  success, over all and by kind of task; so for every evaluation
    tensorboard/rollouts/           some rollouts, as text

What a resumed run writes again takes the place of what stood there from that step on. TensorBoard
forgets by folder, never by tag; hence the folders. Left out: histograms.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanorl.observability.report.metrics import TensorBoardWriter
from nanorl.observability.report.observer import WARM_START, Evaluated, RLEvaluated, RunObserver


class TensorBoardFolders(RunObserver):
    """The parts beside the steps of RL. A part's file is opened by its first line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, TensorBoardWriter] = {}

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def on_restore(self, first_step: int) -> None:
        self.begin_anew()

    async def on_warm_step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.write(WARM_START, step, numbers)

    async def on_evaluation(self, evaluated: Evaluated) -> None:
        self.write_evaluation(evaluated.phase, evaluated.step, evaluated.result.to_json())

    async def on_rl_evaluation(self, evaluated: RLEvaluated) -> None:
        for split, numbers in evaluated.figures.items():
            self.write(f"evaluation/rl_{split}", evaluated.step, numbers)

    def write(self, part: str, step: int, values: Mapping[str, Any]) -> None:
        """The finite numbers of `values`, under the tag `part/name`."""
        self._writer(part, step).write(step, {part: values})

    def write_text(self, part: str, step: int, title: str, text: str) -> None:
        """A text to read, under the tag `part/title`."""
        self._writer(part, step).write_text(step, f"{part}/{title}", text)

    def write_evaluation(self, name: str, step: int, result: Mapping[str, Any]) -> None:
        """The result of an evaluation, with the rate of success by kind of task."""
        rates = {kind: solved / num for kind, (solved, num) in result["per_kind"].items()}
        values = {name: one for name, one in result.items() if name != "per_kind"}
        self.write(f"evaluation/{name}", step, values | {"success_of": rates})
        self._writers.pop(f"evaluation/{name}").close()  # another one of its name begins anew

    def begin_anew(self) -> None:
        """The run goes back to a checkpoint: what is written next hides what stood there."""
        self.close()
        self._writers.clear()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, part: str, step: int) -> TensorBoardWriter:
        if part not in self._writers:
            self._writers[part] = TensorBoardWriter(self._folder / part, purge_step=step)
        return self._writers[part]
