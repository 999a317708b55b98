"""metrics.jsonl: one line a step, on the disk before `write` returns; optionally TensorBoard too.

A line torn by `kill -9` is dropped when the file is opened again; `truncate_from` forgets the steps
that a resume repeats, so that every step occurs exactly once. JSON has no NaN: it is written as
null, and the report draws a gap. Left out: averaging and windows, which belong to the reader.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorl.observability.report.observer import RunObserver
from nanorl.observability.report.summary import write_atomically

if TYPE_CHECKING:
    from nanorl.observability.results import StepResult


def to_jsonable(value: Any) -> Any:
    """Plain JSON data: NaN and infinities become null, numpy and torch scalars become numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): to_jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return to_jsonable(value.item())
    raise ValueError(
        f"{value!r} of type {type(value).__name__} cannot be logged; "
        "give numbers, strings, None, or lists and dicts of them"
    )


def flatten_numbers(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers, nested ones by their path: `{"time": {"train": 2}}` is `time/train`."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat.update(flatten_numbers(value, f"{prefix}{name}/"))
        elif isinstance(value, int | float) and math.isfinite(value):
            flat[f"{prefix}{name}"] = float(value)
    return flat


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows in order; [] without a file. A torn last line is left out.

    ValueError if any other line is damaged, or if steps do not rise.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn or empty
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            step = int(row["step"])
            if rows and step <= rows[-1]["step"]:
                raise ValueError(f"step {step} follows step {rows[-1]['step']}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is not a metrics row ({error}); delete the line, or move "
                "the file away"
            ) from error
        rows.append(row)
    return rows


class MetricsWriter(RunObserver):
    """Appends rows with rising `step`. `tensorboard_dir` adds event files for TensorBoard."""

    def __init__(self, path: str | Path, *, tensorboard_dir: str | Path | None = None) -> None:
        self.path = Path(path)
        self._tensorboard_dir = tensorboard_dir
        self._tensorboard: TensorBoardWriter | None = None
        self._drop_torn_line()
        rows = read_metrics(self.path)
        self.last_step: int | None = rows[-1]["step"] if rows else None
        self._fd = self._open()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the line `{"step": step, ...values}` and sync it to the disk.

        ValueError if the step was written before. OSError, naming the file and the fix, if the disk
        refuses; the file then ends with the last whole line.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"step {step} follows step {self.last_step} in {self.path}: every step is written "
                "once; call truncate_from first when resuming"
            )
        if "step" in values:
            raise ValueError("'step' among the values: it is the name of the row number")
        row = {"step": step, **to_jsonable(values)}
        self._append(json.dumps(row, allow_nan=False).encode("utf-8") + b"\n", step)
        self.last_step = step
        if self._tensorboard_dir is not None:
            if self._tensorboard is None:
                self._tensorboard = TensorBoardWriter(self._tensorboard_dir, purge_step=step)
            self._tensorboard.write(step, row)

    def truncate_from(self, step: int) -> int:
        """Forget the rows of `step` and later, atomically; their number."""
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] < step]
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        os.close(self._fd)  # of the file that was replaced
        self._fd = self._open()
        self.last_step = kept[-1]["step"] if kept else None
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None  # the next write opens one that hides the old steps
        return len(rows) - len(kept)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._tensorboard is not None:
            self._tensorboard.close()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def on_restore(self, first_step: int) -> None:
        self.truncate_from(first_step)

    async def on_step(self, step: StepResult) -> None:
        self.write(step.step, step.metrics)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _drop_torn_line(self) -> None:
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)

    def _append(self, line: bytes, step: int) -> None:
        size = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, size)
            message = (
                f"cannot write the metrics of step {step} ({error.strerror}): make room on the "
                "disk, then go on with --resume"
            )
            raise OSError(error.errno, message, str(self.path)) from error


class TensorBoardWriter:
    """The numbers of each row as scalars. TensorBoard is imported here, because it is slow."""

    def __init__(self, log_dir: str | Path, *, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here: it is slow to import

        self._writer = SummaryWriter(str(log_dir), purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in flatten_numbers(values).items():
            if name != "step":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_text(self, step: int, tag: str, text: str) -> None:
        """A text, shown as it is: what a policy writes is no Markdown."""
        shown = "\n".join(f"    {line}" for line in text.split("\n"))
        self._writer.add_text(tag, shown, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
