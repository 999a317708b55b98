"""The library: the same runs as the console command's, from Python.

    import nanorl

    run = nanorl.train("smollm2", env=Guess, steps=20)
    print(run.success, run.folder)
    print(nanorl.evaluate(run.folder, env=Guess, k=4).pass_at(4))

In a notebook the run goes on in a thread of its own, since the notebook's loop is taken; Ctrl-C (or
the stop button) saves. Anywhere else it runs in the caller's thread, so that a debugger's
breakpoints in an environment work.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorl.options.presets import PRESETS
from nanorl.options.run_config import RunConfig
from nanorl.options.values import read_record
from nanorl.plugins import spec_of
from nanorl.run.parse import check_continuation, configure, read_mapping, with_options

if TYPE_CHECKING:
    from nanorl.inspection.export_trajectories import Exported
    from nanorl.observability.report.evaluation import Evaluation


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A finished run: its config, its summary and its folder."""

    config: RunConfig
    summary: Mapping[str, Any]
    """The fields of summary.json."""

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face folder."""
        return self.folder / "model-trained"

    @property
    def success(self) -> float | None:
        """The share of held-out tasks that the trained model solves."""
        return self.summary["heldout_success_after"]

    def _repr_html_(self) -> str:
        from nanorl.observability.report.notebook import run_html  # here: only a notebook asks

        return run_html(self.summary, self.folder)


def train(
    model: str | None = None,
    *,
    env: Any = None,
    steps: int | None = None,
    out: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
) -> TrainedRun:
    """Train an agent, as `nanorl train` does.

    `model` is a preset (smollm2, tiny, tiny_vision), a Hugging Face folder or a name; None: what
    `options`, a file they name or the run that goes on says, else smollm2; `env` a class derived
    from `nanorl.Env`, or a text as `--env` takes it, or a list of several; `options` any others by
    their names on the command line, {"rl.lr": 1e-5, "seed": 1}. ValueError where something is wrong
    with them. Stopping it raises `Interrupted` after saving.
    """
    given: dict[str, Any] = dict(options or {})
    if model is not None and model not in PRESETS:
        given["model"] = model
    if steps is not None:
        given["rl.steps"] = steps
    if out is not None:
        given["out"] = out
    config, kind = configured(model, env, given)
    from nanorl.commands.train import run_training  # here: other verbs need none of it

    config, summary = run_training(config, env=kind, run_to_end=run_to_end)
    return TrainedRun(config=config, summary=summary)


def evaluate(
    model: Path | str = "smollm2",
    *,
    env: Any = None,
    num_tasks: int = 100,
    k: int = 1,
    out: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Play held-out tasks with a model, as `nanorl eval` does.

    `model` is a run's folder, a Hugging Face folder or a name; `k` how often each task is played;
    `env` as in `train`; `options` others of that command, {"temperature": 0.7}. ValueError where
    something is wrong with them. What comes back has `success`, `pass_at(k)` and every task's
    score.
    """
    # Here: other verbs need none of it.
    from nanorl.commands.evaluate import EvalOptions, evaluation_of

    given: dict[str, Any] = {"model": str(model), "num_tasks": num_tasks, "k": k, "out": out}
    named, env = _named(env)
    if named:
        given["env"] = named
    chosen = read_record(EvalOptions, given | dict(options or {}), where="evaluate")
    return evaluation_of(chosen, env=env, run_to_end=run_to_end)[0]


def export(run: Path | str, to: str, **options: Any) -> Exported:
    """Write the stored rollouts of a run, as `nanorl export` does.

    `to` is "jsonl", "parquet", "atif" or "otel"; `options` are the others of that command, as
    `out="good.jsonl", min_reward=1.0`. ValueError where something is wrong with them, or where the
    run has no such rollouts.
    """
    # Here: other verbs need none of it.
    from nanorl.inspection.export_trajectories import ExportOptions, export_rollouts

    given = {"run": run, "to": to, **options}
    return export_rollouts(read_record(ExportOptions, given, where="export"))


def configured(model: str | None, env: Any, options: Mapping[str, Any]) -> tuple[RunConfig, Any]:
    """The options of a run, and the environment where it goes along as an object.

    A class that other processes can find goes by its name where the run has such processes. An
    object plays in this process; its name is kept, so that nobody takes the run for another's.
    """
    given: dict[str, Any] = {"preset": model} if model in PRESETS else {}
    given |= options
    file = given.pop("config", None)
    named, env = _named(env)
    if named:
        given["env"] = named
    read = read_mapping(given, where="train")
    config, env = _with_environment(configure(read, file and Path(file), env), env)
    check_continuation(config)
    return config, env


def _named(env: Any) -> tuple[str | list[str], Any]:
    """Say what `--env` would be, and the object that goes along; several have a name each from the
    start, since options are said by it. One object alone gets its name later."""
    if isinstance(env, list | tuple):
        if len(env) == 1:
            return _named(env[0])
        if not env:
            raise ValueError("env=[]: names no environment; leave it out, or name one")
        objects = [None if isinstance(one, str) else one for one in env]
        names = [one if isinstance(one, str) else _name_of(one) for one in env]
        return names, objects if any(one is not None for one in objects) else None
    return (env, None) if isinstance(env, str) else ("", env)


def _with_environment(config: RunConfig, env: Any) -> tuple[RunConfig, Any]:
    """Put the environment's name into the config, and return with it the object that goes along;
    None where the name is enough."""
    if env is None:
        return config, None
    if config.cluster.backend == "inline":
        name = config.env if isinstance(env, list) else _name_of(env)
        return dataclasses.replace(config, env=name, env_workers=0), env
    if isinstance(env, list):
        specs = zip(config.envs, env, strict=True)
        found = [spec if one is None else _found_elsewhere(one) for spec, one in specs]
        return with_options(config, {"env": found}, where="train"), None
    return with_options(config, {"env": _found_elsewhere(env)}, where="train"), None


def _found_elsewhere(env: Any) -> str:
    """The name by which other processes find the class."""
    name = spec_of(env)
    if name is None:
        raise ValueError(
            f"env={env!r}: other processes cannot find it; put the class into a file and import it "
            "from there, or leave cluster.backend inline"
        )
    return name


def _name_of(env: Any) -> str:
    """The name with which a run is recorded, so that `nanorl eval RUN` and others find its
    environment, or say that they do not: never another one.

    A file goes by its path, a module of a package by its name. A script is not run once more for
    its class: it may train again.
    """
    module = sys.modules.get(env.__module__)
    name = getattr(env, "__qualname__", type(env).__qualname__)
    file = getattr(module, "__file__", None)
    is_alone = env.__module__ != "__main__" and "." not in env.__module__
    if file and is_alone and "<locals>" not in name:
        return f"{Path(file).resolve()}:{name}"
    return f"{env.__module__}:{name}"


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, in this thread unless it has a running loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    _Apart(work).wait()


class _Apart:
    """A coroutine in a thread of its own."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._has_to_stop = False
        self._thread = threading.Thread(target=self._run, name="nanorl run")
        self._thread.start()

    def wait(self) -> None:
        """Wait for its end; Ctrl-C asks it to save and stop. Raises what it raised."""
        is_over = False
        while not is_over:
            try:
                self._thread.join(timeout=1.0)  # without a limit no signal would be seen
                is_over = not self._thread.is_alive()
            except KeyboardInterrupt:
                with contextlib.suppress(RuntimeError):  # its loop is closed: it ends anyway
                    self._loop.call_soon_threadsafe(self._stop)
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        """Once: a second Ctrl-C would cut what the first has begun, and it may come before there is
        a task."""
        if self._task is not None and not self._has_to_stop:
            self._task.cancel()
        self._has_to_stop = True

    def _run(self) -> None:
        async def main() -> None:
            self._task = asyncio.ensure_future(self._work)
            if self._has_to_stop:
                await asyncio.sleep(0)  # it begins, and can end in its own way
                self._task.cancel()
            await self._task

        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(main())
        except BaseException as error:  # handed to the thread that waits
            self._error = error
