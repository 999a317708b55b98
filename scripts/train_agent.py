"""The command line of a training run; `scripts/train_agent.sh` calls it after set-up.

Exit status: 0 finished, 1 something was wrong (one message says what and how to mend it),
130 stopped with Ctrl-C (saved, unless it was pressed three times; the message says how to go on).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from pathlib import Path

import tyro

from nanoengine.stop_signals import EXIT_STATUS, Interrupted
from nanorl.algorithms.spec import RECIPES
from nanorl.config import RunConfig
from nanorl.continuation import (
    begin,
    check_fork,
    check_resume,
    fork_defaults,
    read_config,
    take_over,
)
from nanorl.presets import PRESETS, get_preset
from nanorl.report.next_steps import how_to_go_on, next_steps


def parse_arguments(arguments: list[str]) -> RunConfig:
    """Defaults from the preset and the named algorithm, or from the run that --resume goes on with;
    then the flags."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", default="smollm2")
    early.add_argument("--algorithm")
    early.add_argument("--out", type=Path)
    early.add_argument("--seed", type=int, default=0)
    early.add_argument("--resume", action="store_true")
    early.add_argument("--fork", default="")
    known, _ = early.parse_known_args(arguments)
    if known.resume and known.fork:
        raise ValueError(
            f"--fork {known.fork} with --resume: a fork begins a run, and --resume --out FOLDER "
            "goes on with one; leave one of them out"
        )
    default = get_preset(known.preset).config()
    saved = None
    if known.resume:
        folder = dataclasses.replace(default, out=known.out, seed=known.seed).run_dir
        saved = read_config(folder, flag="--resume")
        default = dataclasses.replace(saved, out=folder, resume=True)
    elif known.fork:
        default = fork_defaults(known.fork)
    if known.algorithm is not None and not (saved and saved.algorithm == known.algorithm):
        default = default.with_algorithm(known.algorithm)
    config = tyro.cli(
        RunConfig,
        default=default,
        args=arguments,
        prog="bash scripts/train_agent.sh",
        description=describe(),
    )
    if saved is not None:
        check_resume(saved, config)
    elif config.fork:
        check_fork(config)
    return config


def describe() -> str:
    """The text of --help before the options."""
    title = f"Train an agent with reinforcement learning. Presets: {', '.join(PRESETS)}."
    recipes = (f"- {name}: {recipe.summary}" for name, recipe in RECIPES.items())
    return "\n".join((title, "", "Algorithms (--rl.algorithm.* changes parts of one):", *recipes))


def train(config: RunConfig) -> int:
    import torch  # here, so that a wrong flag is answered at once

    from kernels.host_memory import reuse_large_buffers
    from nanoengine.state.run_folder import RunFolder
    from nanorl.parts import Parts
    from nanorl.report.live import LiveView
    from nanorl.roles.launch import make_roles
    from nanorl.run import Run, write_outcome
    from nanorl.trackers.services import require_trackers

    require_trackers(config.log)
    reuse_large_buffers()
    torch.set_num_threads(1)  # of this thread; see parts.py
    with RunFolder(config.run_dir, is_resumed=config.resume) as folder:
        if config.fork and not config.resume:
            take_over(config)
        parts = Parts(config)
        config = parts.config  # with what was chosen for this machine
        roles = make_roles(parts)
        try:
            begin(folder, config)
            print(f"run directory: {config.run_dir}\ndevice: {config.device}", flush=True)
            with LiveView(f"{config.preset}, seed {config.seed}") as live:
                run = Run(parts, roles, live)
                asyncio.run(run.execute())
                summary = write_outcome(run)
        finally:
            roles.close()
    report(config, summary)
    return 0


def report(config: RunConfig, summary: dict) -> None:
    from nanorl.report.summary import success_rates

    print("\nsuccess on held-out tasks, never trained on, greedy:")
    for title, rate, num_tasks in success_rates(summary):
        figure = "not measured" if rate is None else f"{rate:6.1%} of {num_tasks}"
        print(f"  {title:<22} {figure}")
    print(
        f"time {summary['wall_s'] / 60:.1f} min, engine-trainer log-prob gap at most "
        f"{summary['logp_gap_max'] or 0.0:.2g} nats\n"
        f"look: {config.run_dir}/report.html   metrics: metrics.jsonl   rollouts: rollouts.sqlite\n"
        f"the trained model, a Hugging Face folder: {config.run_dir}/model-trained\n"
        f"{next_steps(config)}"
    )


def main() -> int:
    try:
        config = parse_arguments(sys.argv[1:])
        try:
            return train(config)
        except (Interrupted, KeyboardInterrupt) as stop:
            print(how_to_go_on(config, has_saved=isinstance(stop, Interrupted)))
            return EXIT_STATUS
    except tuple(expected_errors()) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


def expected_errors() -> list[type[Exception]]:
    """The errors that a user can mend: shown as one message without a traceback."""
    from nanoengine.engine import NonFiniteLoss
    from nanoengine.tensor_file import CheckpointError
    from nanorl.roles.role import RoleLost
    from nanorl.sandbox.base import SandboxUnavailable
    from nanorl.store import StoreError

    ours = (CheckpointError, NonFiniteLoss, RoleLost, SandboxUnavailable, StoreError)
    return [ValueError, OSError, *ours]


if __name__ == "__main__":
    sys.exit(main())
