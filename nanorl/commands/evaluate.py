"""`nanorl eval MODEL`: plays held-out tasks and says how many succeed, and how sure that is.

    nanorl eval smollm2 --num-tasks 100
    nanorl eval runs/tiny-seed0 --k 8              # a run: its trained model, with its own options
    nanorl eval smollm2 --env maze.py             # an environment of your own
    nanorl eval owner/name --tasks test.jsonl      # tasks of your own

The folder of the result (--out) holds eval.json, with every task's score, for `nanorl compare`,
and rollouts.sqlite with the rollouts themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from nanoinfer.params import SamplingParams
from nanorl.bounds import COUNT, Bound, check_number, check_record
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import run_kind
from nanorl.options.trust import PLAYED, remember, require_but
from nanorl.run.parse import configure, for_environment, with_options

if TYPE_CHECKING:
    from nanorl.observability.report.evaluation import Evaluation
    from nanorl.run.restarts import RunToEnd
    from nanorl.run.saved_models import SavedModels
    from nanorl.task import Task
    from nanorl.types import Rollout

RESULT = "eval.json"
PHASE = "held-out tasks"


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """The options of `nanorl eval`."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run's folder, a Hugging Face folder, a .gguf file, a hub id, or smollm2."""
    num_tasks: int = 100
    """How many held-out tasks, at most."""
    k: int = 1
    """Samples of each task, for pass@k."""
    temperature: float | None = None
    """Of the sampling; default 0 (greedy) for one sample, else 1."""
    preset: str = "smollm2"
    """Where environment and limits come from, unless MODEL is a run, which has its own."""
    env: str | tuple[str, ...] = ""
    """As in training: a file (maze.py), module:Class, or one of those that come along; or several.
    """
    env_weights: tuple[float, ...] = ()
    """Of several environments, how many tasks of each are played, in proportion."""
    env_args: tuple[str, ...] = ()
    """Its arguments, as name=value; of several NAME.name=value."""
    reward: str = ""
    """A reward in place of the environment's own."""
    agent: str = ""
    """The agent loop: tool, single_turn, feedback, compact, sub_agents, or yours, file.py:loop."""
    agent_args: tuple[str, ...] = ()
    """Its options, as name=value."""
    tasks: str | None = None
    """Tasks of your own, as in training; those that are held out (or `test`) are played."""
    task_fields: tuple[str, ...] = ()
    """Which column is which field of a task: prompt=question answer=solution."""
    seed: int | None = None
    """Of the list of held-out tasks and of the sampling; default: that of training's own list."""
    out: Path | None = None
    """Folder of the result; default runs/eval-NAME."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    as_json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        check_record(self, "", num_tasks=COUNT, k=Bound(1, 1024, "all rollouts are held in memory"))
        if self.temperature is not None:
            check_number("--temperature ", self.temperature, 0)
        if self.k > 1 and self.temperature == 0.0:
            raise ValueError(
                f"--temperature 0 with --k {self.k}: greedy samples are all alike; use --k 1"
            )

    def run_config(self, saved: SavedModels, env: object = None) -> RunConfig:
        """The options of a run that would play these tasks with the models of `saved`; `env` is an
        environment given as an object."""
        if saved.run is None:
            named = {"env": self.env, "env_args": self.env_args, "env_weights": self.env_weights}
            config = configure({"preset": self.preset, **named}, env=env)
        else:
            one = RunConfig()  # in one process, however the run was laid out
            config = replace(
                _with_record(saved.run),
                cluster=one.cluster,
                learner=one.learner,
                rollout=one.rollout,
            )
        given = {
            "env": self.env,
            "env_args": self.env_args,
            "env_weights": self.env_weights,
            "reward": self.reward,
            "agent.loop": self.agent,
            "agent.loop_args": self.agent_args,
            "tasks": self.tasks,
            "task_fields": self.task_fields,
        }
        given = {name: value for name, value in given.items() if value}
        if self.env and saved.run is not None:  # another one than the run's, with its own limits
            config = replace(config, env="", env_args=(), env_weights=())
        config = with_options(config, given, where="nanorl eval")
        if self.env and saved.run is not None:
            config = for_environment(config, run_kind(config, env))
        if saved.run is not None:
            require_but(config.to_json(), saved.run.run_dir, PLAYED, given)
        seed = config.evaluation.seed if self.seed is None else self.seed
        return replace(
            config,
            evaluation=replace(config.evaluation, num_tasks=self.num_tasks, seed=seed),
            rl=replace(config.rl, steps=0),  # so no task for training is needed
            device=self.device,
            env_workers=config.env_workers if env is None else 0,  # no other process finds it
            resume=False,
            fork="",
            out=_new_folder(self.out, self.model),
        )


def evaluate_model(options: Annotated[EvalOptions, tyro.conf.arg(name="")]) -> int:
    """Play held-out tasks with a model, or with what a run has trained."""
    # Here: the help is faster without.
    from nanorl.observability.report.evaluation import evaluation_text

    result, folder = evaluation_of(options)
    if options.as_json:
        print(json.dumps(result.to_json(), indent=2))
        return 0
    print(
        f"{evaluation_text(result)}\nlook: {folder}/{RESULT}   rollouts: {folder}/rollouts.sqlite"
    )
    return 0


def evaluation_of(
    options: EvalOptions, *, env: object = None, run_to_end: RunToEnd = asyncio.run
) -> tuple[Evaluation, Path]:
    """Evaluate the model that is named, and return the result with the folder in which it lies. The
    verb and the library share this. `env` and `run_to_end` as in `run_evaluation`."""
    from nanorl.run.saved_models import find_models  # here: it imports torch

    saved = find_models(options.model)
    config = options.run_config(saved, env)
    heat = float(options.k > 1) if options.temperature is None else options.temperature
    with saved.folder() as folder:
        result = run_evaluation(
            replace(config, model=str(folder)),
            title=options.model,
            samples=options.k,
            sampling=SamplingParams(temperature=heat, seed=config.evaluation.seed),
            env=env,
            run_to_end=run_to_end,
        )
    return result, config.run_dir


def run_evaluation(
    config: RunConfig,
    *,
    title: str,
    samples: int,
    sampling: SamplingParams,
    env: object = None,
    run_to_end: RunToEnd = asyncio.run,
) -> Evaluation:
    """Play the held-out tasks of `config` and write the result into its folder.

    `env` is an environment given as an object; `run_to_end` runs a coroutine to its end.
    """
    import torch  # here, so that a wrong option is answered at once
    from rich.console import Console

    from nanorl.distributed.roles.player import Player
    from nanorl.observability.report.evaluation import Evaluation
    from nanorl.observability.report.live import LiveView
    from nanorl.observability.store import RolloutStore
    from nanorl.options.parts import Parts
    from nanorl.run.heldout_success import evaluate, too_few
    from nanorl.run.manifest import manifest_of

    remember(config.to_json())
    torch.set_num_threads(1)  # of this thread: the engine's own uses several
    parts = Parts(config, env=env)
    tasks, folder = parts.tasks.heldout[: config.evaluation.num_tasks], config.run_dir
    player = Player(parts)
    played: list[tuple[Task, Rollout]] = []
    start = time.perf_counter()

    async def play_all() -> None:
        with (
            _alone_in(folder),
            # On stderr: stdout is for the result.
            LiveView(f"evaluation of {title}", console=Console(stderr=True)) as live,
            RolloutStore(folder / "rollouts.sqlite") as store,
        ):
            store.put_fact("start/0", manifest_of(parts))
            store.add_tasks(tasks)
            live.start_phase(PHASE, len(tasks) * samples)

            def keep(rollout: Rollout) -> None:
                store.add_group([rollout], step=0)  # at once: a stopped evaluation leaves them
                live.advance(PHASE)

            try:
                result = await evaluate(
                    player.play, tasks, name="model", samples=samples, sampling=sampling,
                    on_rollout=keep,
                )  # fmt: skip
                played.extend(result.played)
            finally:
                await player.close_loop()

    try:
        run_to_end(play_all())
    finally:
        player.close()
    result = Evaluation.of(
        played,
        title=title,
        about=_about(parts.config, samples, sampling),
        seconds=time.perf_counter() - start,
    )
    result.write(folder / RESULT)
    if note := too_few(tasks, config.evaluation.num_tasks):
        print(note, file=sys.stderr)
    return result


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Make the folder and keep others out. ValueError where another evaluation, which found it free
    as well, has come first: it was chosen before the model was read, which takes a while."""
    from nanoengine.state.run_folder import LOCK, take_lock  # here: it imports torch

    folder.mkdir(parents=True, exist_ok=True)
    lock = take_lock(folder / LOCK)
    try:
        if (folder / "rollouts.sqlite").exists():
            raise ValueError(
                f"--out {folder}: another evaluation was written there meanwhile; choose another "
                "folder"
            )
        yield
    finally:
        (folder / LOCK).unlink()
        os.close(lock)


def _with_record(run: RunConfig) -> RunConfig:
    """The run's options with the record of what its environment has asked, where it keeps one: what
    it was answered, it is answered again."""
    if run.http.mode in ("off", "live"):
        return run
    return replace(run, http=replace(run.http, store=run.http_store))


def _about(config: RunConfig, samples: int, sampling: SamplingParams) -> dict[str, Any]:
    from nanorl.observability.report.summary import git_commit  # here: the help is faster without

    return {
        "model": config.model,
        "preset": config.preset,
        "env": config.env,
        "tasks": config.tasks,
        "seed": config.evaluation.seed,
        "samples_per_task": samples,
        "temperature": sampling.temperature,
        "options": config.to_json(),
        "git_commit": git_commit(Path(__file__).resolve().parents[2]) or "unknown",
        "command": " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
    }


def _new_folder(out: Path | None, model: str) -> Path:
    """A folder that is not there or empty; the first free one of the default's."""
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"--out {out}: it is not empty; choose another folder")
        return _writable(out)
    name = re.sub(r"[^\w.-]+", "-", model).strip("-") or "model"
    number = 1
    while (folder := Path("runs") / f"eval-{name}{f'-{number}' if number > 1 else ''}").exists():
        number += 1
    return _writable(folder)


def _writable(folder: Path) -> Path:
    """The folder, which is made when there is something to write. ValueError where it cannot be."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK, effective_ids=True)):
        raise ValueError(
            f"--out {folder}: {there} may not be written; choose a folder that you may write into"
        )
    return folder
