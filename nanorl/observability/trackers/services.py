"""The trackers, each through its own package, in a process of its own (sending.py).

Every tracker keeps its usual settings: WANDB_MODE=offline, MLFLOW_TRACKING_URI, TRACKIO_DIR,
CLEARML_OFFLINE_MODE=1 and so on, and the credentials that its own log-in stored. A run has one
identity, which its folder keeps, so a resumed run goes on in the same page; steps that it repeats
are sent again.

Left out: models as artifacts; they stay in the run's folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from nanoengine.extras import missing
from nanorl.observability.report.observer import WARM_START
from nanorl.observability.trackers.rollout_rows import RolloutRow, as_columns

_CLEARML_TASK = "clearml-task"  # the file with its id, in the run's folder
# What it would watch of its own accord. A tracker's process trains nothing, and the search for a
# repository hangs in a process that was forked from one with threads.
_CLEARML_WATCHED = (
    *("detect_repository", "matplotlib", "tensorflow", "tensorboard", "pytorch", "xgboost"),
    *("scikit", "fastai", "lightgbm", "hydra", "tfdefines", "joblib", "megengine", "catboost"),
    "gradio",
)
_MLFLOW_PARAMS = 100  # in one request: MLflow's REST API, "Log Batch"
_MLFLOW_PARAM_CHARS = 6000
_MLFLOW_TABLES = "mlflow.loggedArtifacts"  # the tag by which its page finds tables


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The description of a run that a tracker shows beside its numbers."""

    project: str
    name: str
    identity: str  # the same in every process of the run
    folder: Path
    options: Mapping[str, Any]  # rl.lr: 1e-5


class Tracker(Protocol):
    """One page of one tracker. Made from a `TrackedRun`; every method may raise what it likes."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of a step."""
        ...

    def log_rollouts(self, step: int, part: str, rows: Sequence[RolloutRow]) -> None:
        """Rollouts to read; `part` is rl, or the evaluation that played them."""
        ...

    def finish(self) -> None:
        """Send what is left."""
        ...


class WandbTracker:
    """Weights & Biases. Its own step may not go back, as a resumed run does, so `step` is a number
    like others, and the x axis."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # here: an extra

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.identity,
            resume="allow",
            dir=str(run.folder),
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        self._run.config.update(dict(run.options), allow_val_change=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric(f"{WARM_START}/*", step_metric=f"{WARM_START}/step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        is_warming = all(name.startswith(f"{WARM_START}/") for name in numbers)
        axis = f"{WARM_START}/step" if is_warming else "step"
        self._run.log({axis: step, **numbers})

    def log_rollouts(self, step: int, part: str, rows: Sequence[RolloutRow]) -> None:
        columns = as_columns(rows)
        data = [list(values) for values in zip(*columns.values(), strict=True)]
        table = self._wandb.Table(columns=list(columns), data=data)
        self._run.log({"step": step, f"rollouts/{part}": table})

    def finish(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow. Its parameters cannot change, so what a resumed run changed is among its tags."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient  # here: an extra

        self._client = client = MlflowClient()
        found = client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else client.create_experiment(run.project)
        same = f"tags.`nanorl.run` = '{run.identity}'"
        runs = client.search_runs([experiment], filter_string=same, max_results=1)
        if runs:
            client.update_run(runs[0].info.run_id, status="RUNNING")
        tags = {"nanorl.run": run.identity}
        page = runs[0] if runs else client.create_run(experiment, run_name=run.name, tags=tags)
        self._id = page.info.run_id
        told = json.loads(page.data.tags.get(_MLFLOW_TABLES, "[]"))
        self._tables: dict[str, Any] = {one["path"]: one for one in told}
        self._log_options(run.options, page.data.params)

    def _log_options(self, options: Mapping[str, Any], known: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag  # here: an extra

        texts = {name: str(value)[:_MLFLOW_PARAM_CHARS] for name, value in options.items()}
        new = [Param(name, text) for name, text in texts.items() if name not in known]
        changed = [
            RunTag(f"{name}.changed", text)
            for name, text in texts.items()
            if known.get(name, text) != text
        ]
        for first in range(0, len(new), _MLFLOW_PARAMS):
            part = new[first : first + _MLFLOW_PARAMS]
            self._client.log_batch(self._id, params=part)
        self._client.log_batch(self._id, tags=changed)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # here: an extra

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_rollouts(self, step: int, part: str, rows: Sequence[RolloutRow]) -> None:
        file = f"rollouts/{part}-{step:05d}.json"
        columns = as_columns(rows)
        data = [list(values) for values in zip(*columns.values(), strict=True)]
        # As its log_table writes it, which appends instead where a resumed run comes again.
        self._client.log_dict(self._id, {"columns": list(columns), "data": data}, file)
        self._tables[file] = {"path": file, "type": "table"}
        self._client.set_tag(self._id, _MLFLOW_TABLES, json.dumps(list(self._tables.values())))

    def finish(self) -> None:
        self._client.set_terminated(self._id)


class TrackioTracker:
    """Trackio, a local database with a dashboard, or a Hugging Face Space."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio  # here: an extra

        self._trackio = trackio
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.identity[:6]}",  # it knows a run by its name
            config=dict(run.options),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def log_rollouts(self, step: int, part: str, rows: Sequence[RolloutRow]) -> None:
        import pandas  # here: trackio brings it

        table = self._trackio.Table(dataframe=pandas.DataFrame(as_columns(rows)))
        self._run.log({f"rollouts/{part}": table}, step=step)

    def finish(self) -> None:
        self._run.finish()


class ClearmlTracker:
    """ClearML. It knows a run by an id of its own, which the run's folder keeps."""

    def __init__(self, run: TrackedRun) -> None:
        from clearml import Task  # here: an extra

        file = run.folder / _CLEARML_TASK
        known = file.read_text("utf-8").strip() if file.is_file() else ""
        self._task: Any = Task.init(
            project_name=run.project,
            task_name=run.name,
            reuse_last_task_id=known or False,
            continue_last_task=0 if known else False,  # 0: steps keep their numbers
            auto_connect_arg_parser=False,
            auto_connect_frameworks=dict.fromkeys(_CLEARML_WATCHED, False),
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        file.write_text(f"{self._task.id}\n", "utf-8")
        self._task.set_parameters({f"options/{name}": str(v) for name, v in run.options.items()})

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        logger = self._task.get_logger()
        for name, value in numbers.items():
            title, _, series = name.rpartition("/")
            logger.report_scalar(title or series, series, value=value, iteration=step)

    def log_rollouts(self, step: int, part: str, rows: Sequence[RolloutRow]) -> None:
        columns = as_columns(rows)
        table = [list(columns), *map(list, zip(*columns.values(), strict=True))]
        self._task.get_logger().report_table(
            f"rollouts/{part}", f"step {step}", iteration=step, table_plot=table
        )

    def finish(self) -> None:
        self._task.close()


SERVICES: Mapping[str, Callable[[TrackedRun], Tracker]] = MappingProxyType(
    {
        "wandb": WandbTracker,
        "mlflow": MlflowTracker,
        "trackio": TrackioTracker,
        "clearml": ClearmlTracker,
    }
)


class TrackerProcess:
    """One tracker in a process that may hang, print, and die as it likes."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        quiet = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):  # what a tracker prints would tear the run's display
            os.dup2(quiet, descriptor)
        os.close(quiet)
        self._tracker = SERVICES[name](run)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._tracker.log(step, numbers)

    def log_rollouts(self, step: int, part: str, rows: Sequence[RolloutRow]) -> None:
        self._tracker.log_rollouts(step, part, rows)

    def finish(self) -> None:
        self._tracker.finish()


def require_trackers(names: tuple[str, ...]) -> None:
    """ValueError if the package of one is missing; it names the extra."""
    for name in names:
        package = "opentelemetry" if name == "otel" else name
        if importlib.util.find_spec(package) is None:
            raise missing(f"--log {name}", package, extra=name)
