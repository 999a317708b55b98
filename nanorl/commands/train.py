"""The command line of a training run; `scripts/train_agent.sh` calls it after set-up.

Exit status: 0 finished, 1 something was wrong (one message says what and how to mend it),
130 stopped with Ctrl-C (saved, unless it was pressed three times; the message says how to go on).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import tyro

from nanoengine.stop_signals import EXIT_STATUS, Interrupted
from nanorl.algorithms.spec import RECIPES
from nanorl.config import RunConfig, require_same_run
from nanorl.presets import PRESETS, get_preset


def parse_arguments(arguments: list[str]) -> RunConfig:
    """Defaults from the preset and the named algorithm, or from the run that --resume goes on with;
    then the flags."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", default="smollm2")
    early.add_argument("--algorithm")
    early.add_argument("--out", type=Path)
    early.add_argument("--seed", type=int, default=0)
    early.add_argument("--resume", action="store_true")
    known, _ = early.parse_known_args(arguments)
    default = get_preset(known.preset).config()
    if known.algorithm is not None:
        default = default.with_algorithm(known.algorithm)
    saved = None
    if known.resume:
        folder = dataclasses.replace(default, out=known.out, seed=known.seed).run_dir
        saved = RunConfig.from_json(read_config(folder))
        default = dataclasses.replace(saved, out=folder, resume=True)
    config = tyro.cli(
        RunConfig,
        default=default,
        args=arguments,
        prog="bash scripts/train_agent.sh",
        description=describe(),
    )
    if saved is not None:
        require_same_run(saved, config)
    return config


def describe() -> str:
    """The text of --help before the options."""
    title = f"Train an agent with reinforcement learning. Presets: {', '.join(PRESETS)}."
    recipes = (f"- {name}: {recipe.summary}" for name, recipe in RECIPES.items())
    return "\n".join((title, "", "Algorithms (--rl.algorithm.* changes parts of one):", *recipes))


def read_config(folder: Path) -> dict:
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"--resume: {file} does not exist, so there is no run to go on with; "
            "name the run's folder with --out, or leave --resume out to start one"
        )
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not readable JSON ({error}); start a new run") from error


def train(config: RunConfig) -> int:
    import torch  # here, so that a wrong flag is answered at once

    from kernels.host_memory import reuse_large_buffers
    from nanoengine.state.run_folder import RunFolder
    from nanorl.parts import Parts
    from nanorl.report.live import LiveView
    from nanorl.roles.launch import make_roles
    from nanorl.run import Run, write_outcome

    reuse_large_buffers()
    torch.set_num_threads(1)  # of this thread; see parts.py
    with RunFolder(config.run_dir, is_resumed=config.resume) as folder:
        parts = Parts(config)
        config = parts.config  # with what was chosen for this machine
        roles = make_roles(parts)
        try:
            folder.begin(config.to_json())
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
        f"the trained model, a Hugging Face folder: {config.run_dir}/model-trained"
    )


def main() -> int:
    try:
        config = parse_arguments(sys.argv[1:])
        try:
            return train(config)
        except (Interrupted, KeyboardInterrupt) as stop:
            return say_how_to_go_on(config, has_saved=isinstance(stop, Interrupted))
    except tuple(expected_errors()) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


def say_how_to_go_on(config: RunConfig, *, has_saved: bool) -> int:
    """Outside of the phases (while the parts are made, or the report) there is nothing to save."""
    if not (config.run_dir / "config.json").exists():
        print("\nstopped before the run began; nothing was written")
        return EXIT_STATUS
    command = f"bash scripts/train_agent.sh --resume --out {config.run_dir}"
    print(f"\nstopped{' and saved' if has_saved else ''}; go on with: {command}")
    return EXIT_STATUS


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
