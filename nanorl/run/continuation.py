"""Going on with a run: what `--resume` and `--fork` may change, and how a fork begins.

A resumed run goes on in its folder, from its newest checkpoint. Options given with `--resume` hold
from there on and become the run's own (config.json); history.jsonl has what they were. Refused is
what would make the stored state, or the scores before and after, mean something else: `KEPT`.
Every checkpoint has the options that it was made with, so an option that somebody has changed in
config.json itself is found, and refused where it has a say in what is computed (`by_hand`).

A fork begins in a folder of its own at a checkpoint of another run, which it does not touch. It
takes over the checkpoint, model, reference and critic (hard links where the file system can) and
the metrics up to there, so that its curves are whole. The rollouts up to there are not copied: they
may be gigabytes, nothing is computed from them, and the history says where they are.

Left out: forks of a run in a folder that this machine does not see.
Next: cursor.py, history.py, run_checkpoints.py (`restore`).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanoengine.state.checkpoint import (
    adopt_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    read_cursor,
    share_folder,
)
from nanoengine.state.run_folder import RunFolder
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.report.summary import write_atomically
from nanorl.options.run_config import RunConfig, flatten
from nanorl.options.run_kind import PICTURES
from nanorl.options.trust import remember, require
from nanorl.run.cursor import (
    AFTER_RL,
    BEST,
    CHECKPOINTS,
    START,
    WARMING_UP,
    Cursor,
    run_and_place,
)
from nanorl.run.history import Event, EventKind, RunHistory

Changes = dict[str, tuple[Any, Any]]
"""Option by its name on the command line, `rl.group_size`: before, after."""

# Which process this is, not what it does.
_OF_THE_PROCESS = ("out", "resume", "fork")

# Where it is computed, what is kept and who looks on: never what is computed (another layout or
# device: up to the order of sums).
_AROUND = (
    *(
        "env_workers",
        "env_deadline_s",
        "cache_dir",
        "save_every",
        "keep_checkpoints",
        "background_saves",
        "keep_start",
        "keep_rollout_steps",
        "keep_rollout_days",
        "keep_rollout_mb",
        "threads",
        "device",
    ),
    *("tool.workers", "cluster", "learner", "rollout", "monitor"),
    *("log", "log_rollouts", "log_project"),
)

# What may be another one from the next step on: numbers of the optimizer, the algorithm, an
# episode, an evaluation, and of the engines.
_FROM_HERE_ON = (
    "algorithm",
    "vision.lr",
    "deterministic",
    "rl",
    "agent",
    "tool",
    "evaluation",
    "engine",
    "http",
)

_NEW = "start a new run with another --out"
_FORK = "--fork {run} --out ANOTHER begins a run of its own there"

KEPT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "preset": ("model and sizes come from it", _NEW),
        "model": ("the checkpoint holds the weights of the run's own model", _NEW),
        **dict.fromkeys(
            ("lora.rank", "lora.alpha", "lora.targets", "lora.rslora", "lora.base_dtype"),
            ("the checkpoint holds the run's own adapter, or all weights", _NEW),
        ),
        "vision.train": ("the checkpoint holds what was trained of the tower", _NEW),
        "dtype": ("the steps so far were computed in the other", _FORK),
        "seed": ("it gives every step its tasks and its random numbers", _FORK),
        "tasks": ("a resumed run goes on with the same tasks", _FORK),
        "evaluation.seed": ("the scores before and after would be of other tasks", _FORK),
        "warm_start": ("the warm start is over", _NEW),
    }
)
"""Options that a run keeps: why, and what to do instead. So do those that no list here names: they
say what the run is about."""

_PLAYED = ("tasks", "env", "env_args", "env_weights", "reward", "reward_args")
"""Options that decide what is played, and what it earns."""

_HELDOUT = (*_PLAYED, "evaluation.seed")
"""Options that decide which tasks an evaluation is of, and which of them are solved."""


def differences(saved: RunConfig, config: RunConfig) -> Changes:
    """The options that differ, without those of the process."""
    then, now = flatten(saved.to_json()), flatten(config.to_json())
    return {
        name: (then[name], now[name])
        for name in now
        if name not in _OF_THE_PROCESS and then[name] != now[name]
    }


def recorded(config: RunConfig) -> dict[str, Any]:
    """The options by their names, as a checkpoint keeps them."""
    options = flatten(config.to_json())
    return {name: value for name, value in options.items() if name not in _OF_THE_PROCESS}


def computes(option: str) -> bool:
    """Say whether the option has a say in what is computed."""
    return not _is_among(option, _AROUND)


def _is_among(option: str, names: tuple[str, ...]) -> bool:
    """Say whether the option, or the section that it is in, is named."""
    return option in names or option.partition(".")[0] in names


def read_config(folder: Path, *, flag: str) -> RunConfig:
    """The options of the run in that folder. ValueError, which names the flag, without a run."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{flag}: {file} does not exist, so there is no run to go on with; "
            f"name the run's folder, or leave {flag.split()[0]} out to start one"
        )
    try:
        options = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON ({error}); start a new run") from error
    require(options, folder)
    return RunConfig.from_json(options)


# -- resume ----------------------------------------------------------------------------------------


def check_resume(saved: RunConfig, config: RunConfig) -> None:
    """ValueError unless the run whose options were `saved` can go on with `config`, naming every
    option that cannot change, why, and what to do instead."""
    changed = differences(saved, config)
    folder = config.run_dir
    newest = latest_checkpoint(folder / "checkpoints")
    cursor = Cursor() if newest is None else _cursor_of(newest, folder, saved)
    _refuse_by_hand(saved, config, cursor, folder)
    refused = {name: rule for name in changed if (rule := _kept(name, cursor, is_fork=False))}
    _refuse("--resume", refused, changed, folder)
    _check_steps("--resume", config, cursor, folder)
    had_it = saved.rl.algorithm.needs_reference and saved.rl.reference == config.rl.reference
    if config.rl.algorithm.needs_reference and not had_it:
        _check_reference(config, cursor, folder)


def by_hand(saved: RunConfig, cursor: Cursor, run: Path) -> Changes:
    """The options that config.json, read as `saved`, has otherwise than the checkpoint of `cursor`
    and than history.jsonl, which has what was given with `--resume` since: recorded, found."""
    given = dict(cursor.options)
    for event in RunHistory(run).read():
        given |= {name: change[1] for name, change in event["changes"].items()}
    found = recorded(saved)
    return {
        name: (given[name], found[name])
        for name, was in cursor.options.items()
        if name in found and found[name] not in (was, given[name])
    }


def _refuse_by_hand(saved: RunConfig, config: RunConfig, cursor: Cursor, run: Path) -> None:
    """ValueError where an option is in force that nobody gave, and that decides what comes out."""
    now = recorded(config)
    refused = {
        name: change
        for name, change in by_hand(saved, cursor, run).items()
        if computes(name) and now[name] == change[1]
    }
    if not refused:
        return
    said = [
        f"{name} is {json.dumps(found)} there, and was {json.dumps(was)} (write "
        f"{json.dumps(was)} again{_or_give(name, found, cursor)})"
        for name, (was, found) in refused.items()
    ]
    raise ValueError(
        f"--resume: {run / 'config.json'} has been changed since the newest checkpoint, and the "
        f"run would end otherwise: {'; '.join(said)}"
    )


def _or_give(option: str, value: Any, cursor: Cursor) -> str:
    """Say how the option may change all the same; empty where it may not."""
    if _kept(option, cursor, is_fork=False):
        return ""
    return f", and give {_flag(option)} {value} with --resume if that is what you want"


def _kept(option: str, cursor: Cursor, *, is_fork: bool) -> tuple[str, str] | None:
    """Why the option cannot change at that place, and what to do instead; None if it can."""
    is_warm_start = option.startswith("warm_start.")
    if is_warm_start and cursor.phase in WARMING_UP:
        return None
    reason, remedy = KEPT.get(
        "warm_start" if is_warm_start else option, ("it says what the run is about", _FORK)
    )
    if option not in KEPT and not is_warm_start and _is_among(option, _AROUND + _FROM_HERE_ON):
        return None
    return None if is_fork and remedy is _FORK else (reason, remedy)


def _refuse(flag: str, refused: Mapping[str, tuple[str, str]], changed: Changes, run: Path) -> None:
    if not refused:
        return
    said = [
        f"{_flag(name)} {changed[name][0]} -> {changed[name][1]} ({reason}; "
        f"{remedy.format(run=shlex.quote(str(run)))})"
        for name, (reason, remedy) in refused.items()
    ]
    raise ValueError(f"{flag}: this cannot change in a run that has begun: {'; '.join(said)}")


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _check_steps(flag: str, config: RunConfig, cursor: Cursor, run: Path) -> None:
    done = cursor.rl_steps_done
    if config.rl.steps < done:
        raise ValueError(
            f"{flag}: --rl.steps {config.rl.steps}: {done} are done; give more, or begin a run of "
            f"its own earlier, --fork {shlex.quote(str(run))}@{config.rl.steps} --out ANOTHER"
        )


def _check_reference(config: RunConfig, cursor: Cursor, run: Path) -> None:
    has_own = config.rl.reference or (run / "reference").is_dir()
    if cursor.rl_steps_done and not has_own:
        raise ValueError(
            "--resume: the algorithm compares with a reference now, and the policy as RL began "
            "was not kept; name one (--rl.reference FOLDER), or compare with the policy of this "
            f"checkpoint (--fork {shlex.quote(str(run))} --out ANOTHER)"
        )


# -- fork ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint that a fork begins at."""

    run: Path
    config: RunConfig  # of that run
    checkpoint: Path
    cursor: Cursor

    @property
    def name(self) -> str:
        return f"{self.run}@{self.cursor.rl_steps_done}"


def find_origin(text: str) -> Origin:
    """Find the checkpoint that RUN, RUN@7, RUN@done or RUN:best names. ValueError says which there
    are."""
    folder, place = run_and_place(text)
    folders = [START, BEST, CHECKPOINTS]  # of two at a place the last is taken, the run's newest
    if not place and text.endswith(f":{BEST}") and not Path(text).exists():
        folder, folders = text.removesuffix(f":{BEST}"), [BEST]
    run = Path(folder)
    config = read_config(run, flag=f"--fork {text}")
    found = [
        Origin(run=run, config=config, checkpoint=one, cursor=cursor)
        for one, cursor in saved_places(run, config, folders)
        # The critic's own checkpoints are deleted as the run's are: the best one may have lost its.
        if not cursor.critic or (run / "critic" / cursor.critic).is_dir()
    ]
    if place and place != "done" and not place.isdigit():
        raise ValueError(f"--fork {text}: give a number of RL steps after the @, or done")
    wanted = [origin for origin in found if _is_at(origin.cursor, place)]
    if wanted:
        return wanted[-1]
    there = ", ".join(dict.fromkeys(_place_of(origin.cursor) for origin in found)) or "none"
    raise ValueError(
        f"--fork {text}: {run} has no such checkpoint; there are: {there}. "
        f"{_why_not(place, config)}"
    )


def _why_not(place: str, config: RunConfig) -> str:
    if place == "0" and not (config.warm_start.steps or config.fork):
        return "RL began with the run's own model: a new run of the same options begins there, too"
    return (
        "Older ones are deleted: it keeps the newest --keep-checkpoints "
        f"{config.keep_checkpoints}, one every --save-every {config.save_every} steps and one at "
        "the end of each phase, and with --evaluation.every the best"
    )


def saved_places(
    run: Path, config: RunConfig, folders: Sequence[str]
) -> Iterator[tuple[Path, Cursor]]:
    """The checkpoints in these folders of a run, each with where the run stood."""
    for name in folders:
        for one in list_checkpoints(run / name):
            yield one, _cursor_of(one, run, config)


def _cursor_of(checkpoint: Path, run: Path, config: RunConfig) -> Cursor:
    steps = RunHistory(run).original("rl.steps", config.rl.steps)
    return Cursor.from_json(read_cursor(checkpoint), rl_steps=steps)


def _is_at(cursor: Cursor, place: str) -> bool:
    if not place:
        return True
    if place == "done":
        return cursor.phase in AFTER_RL
    return cursor.phase not in WARMING_UP and cursor.rl_steps_done == int(place)


def _place_of(cursor: Cursor) -> str:
    if cursor.phase in WARMING_UP:
        return "one before RL (named without @)"
    return f"@{cursor.rl_steps_done}{' (@done)' if cursor.phase in AFTER_RL else ''}"


def fork_defaults(text: str) -> RunConfig:
    """The options of a fork where no others are given: those of the run that it begins in."""
    origin = find_origin(text)
    out = origin.run.with_name(f"{origin.run.name}-fork{origin.cursor.rl_steps_done}")
    return dataclasses.replace(origin.config, out=out, fork=text, resume=False)


def check_fork(config: RunConfig) -> None:
    """ValueError unless a run with these options can begin at the checkpoint `config.fork`."""
    origin = find_origin(config.fork)
    if config.run_dir.resolve() == origin.run.resolve():
        raise ValueError(
            f"--out {config.run_dir}: is the run that --fork begins in; name another folder"
        )
    if config.store and config.store == origin.config.store:
        raise ValueError(
            f"--fork {config.fork}: --store {config.store} has the rollouts of that run; name "
            "another file, or another run=NAME"
        )
    changed = differences(origin.config, config)
    refused = {name: rule for name in changed if (rule := _kept(name, origin.cursor, is_fork=True))}
    _refuse("--fork", refused, changed, origin.run)
    _check_steps("--fork", config, origin.cursor, origin.run)


def take_over(config: RunConfig) -> None:
    """Make the folder of a fork ready: what `config.fork` names, for the run to be restored from.
    The caller holds the folder's lock."""
    origin, target = find_origin(config.fork), config.run_dir
    cursor = origin.cursor
    changed = differences(origin.config, config)
    if "tasks" in changed:
        cursor.tasks = ""  # the run notes its own
    if any(name in changed for name in _HELDOUT):
        cursor.results.clear()
        cursor.evaluations.clear()
    if not config.rl.replay.share or any(name in changed for name in _PLAYED):
        cursor.flow.pop("replay", None)  # nobody wants it, or it would teach other rewards
    elif cursor.flow:
        from nanorl.run.replay_state import flow_of_fork  # few runs replay

        cursor.flow = flow_of_fork(cursor.flow, origin.run, origin.config)
    cursor.best = {}  # its checkpoint is that run's
    cursor.options, cursor.num_starts = recorded(config), 0
    cursor.totals.pop("peak_rss_bytes", None)  # of that run's processes, which may be larger
    adopt_checkpoint(origin.checkpoint, target / "checkpoints", cursor.to_json())
    names = ["model", "reference", PICTURES]  # those of groups that it trains on, or again
    if cursor.critic:
        names.append(f"critic/{cursor.critic}")
    for name in names:
        if (origin.run / name).is_dir() and not (target / name).exists():
            share_folder(origin.run / name, target / name)
    rows = read_metrics(origin.run / "metrics.jsonl")
    kept = (json.dumps(row) + "\n" for row in rows if row["step"] < cursor.rl_steps_done)
    write_atomically(target / "metrics.jsonl", "".join(kept))


# -- both ------------------------------------------------------------------------------------------


def begin(folder: RunFolder, config: RunConfig) -> None:
    """Record that the run goes on, or begins, with these options: history.jsonl, then config.json.
    Killed in between, it is recorded twice."""
    run = config.run_dir
    newest = latest_checkpoint(run / "checkpoints")
    before, origin, edited = config, "", Changes()
    kind: EventKind = "begun"
    if config.resume:
        kind, before = "resumed", read_config(run, flag="--resume")
    elif config.fork:
        found = find_origin(config.fork)
        kind, before, origin = "forked", found.config, found.name
    cursor = Cursor() if newest is None else _cursor_of(newest, run, before)
    if config.resume:
        edited = by_hand(before, cursor, run)
    RunHistory(run).append(
        Event(
            event=kind,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            phase=cursor.phase,
            step=cursor.rl_steps_done,
            changes=edited | differences(before, config),
            origin=origin,
            command=shlex.join(sys.argv),
        )
    )
    options = dataclasses.replace(config, resume=False).to_json()
    remember(options)
    folder.record(options)
