"""The command line of a training run; `scripts/train_agent.sh` calls it after set-up.

Exit status: 0 finished, 1 something was wrong (one message says what and how to mend it),
130 stopped with Ctrl-C (saved; the message says how to go on).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import tyro

from nanorl.config import RunConfig, require_same_run
from nanorl.presets import PRESETS, get_preset


def parse_arguments(arguments: list[str]) -> RunConfig:
    """Defaults from the preset, or from the run that --resume goes on with; then the flags."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", default="smollm2")
    early.add_argument("--out", type=Path)
    early.add_argument("--seed", type=int, default=0)
    early.add_argument("--resume", action="store_true")
    known, _ = early.parse_known_args(arguments)
    default = get_preset(known.preset).config()
    saved = None
    if known.resume:
        folder = dataclasses.replace(default, out=known.out, seed=known.seed).run_dir
        saved = read_config(folder)
        default = dataclasses.replace(RunConfig.from_json(saved), out=folder, resume=True)
    config = tyro.cli(
        RunConfig,
        default=default,
        args=arguments,
        prog="bash scripts/train_agent.sh",
        description=f"Train an agent with reinforcement learning. Presets: {', '.join(PRESETS)}.",
    )
    if saved is not None:
        require_same_run(saved, config)
    return config


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


def prepare_folder(config: RunConfig) -> None:
    """Make the run directory; refuse to write over another run."""
    folder, file = config.run_dir, config.run_dir / "config.json"
    if file.exists() and not config.resume:
        raise ValueError(
            f"{folder} already holds a run: go on with it (--resume --out {folder}), choose "
            f"another --out, or remove it (rm -r {folder})"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not config.resume:
        from nanorl.report.summary import write_atomically

        write_atomically(file, json.dumps(config.to_json(), indent=2) + "\n")


def train(config: RunConfig) -> int:
    import torch  # here, so that a wrong flag is answered at once

    from kernels.host_memory import reuse_large_buffers
    from nanorl.assembly import Parts
    from nanorl.outcome import write_outcome
    from nanorl.report.live import LiveView
    from nanorl.run import Interrupted, Run

    reuse_large_buffers()
    torch.set_num_threads(1)  # of this thread; see assembly.py
    prepare_folder(config)
    print(f"run directory: {config.run_dir}", flush=True)
    parts = Parts(config)
    try:
        with LiveView(f"{config.preset}, seed {config.seed}") as live:
            run = Run(config, parts, live)
            if config.resume:
                run.restore()
            try:
                asyncio.run(run.execute())
            except Interrupted:
                status = 130
            else:
                status = 0
                summary = write_outcome(run)
    finally:
        parts.close()
    if status == 130:
        command = f"bash scripts/train_agent.sh --resume --out {config.run_dir}"
        print(f"\nstopped and saved; go on with: {command}")
        return status
    report(config, summary)
    return status


def report(config: RunConfig, summary: dict) -> None:
    def percent(name: str) -> str:
        value = summary[f"heldout_success_{name}"]
        return "-" if value is None else f"{value:.1%}"

    print(
        f"\nheld-out success, greedy, {summary['heldout_n']} tasks never trained on:\n"
        f"  untrained model          {percent('untrained')}\n"
        f"  after the warm start     {percent('before')}   (supervised, a sloppy teacher)\n"
        f"  after RL                 {percent('after')}   ({summary['steps']} steps)\n"
        f"  the same, tool off       {percent('no_tool')}\n"
        f"time {summary['wall_s'] / 60:.1f} min, engine-trainer log-prob gap at most "
        f"{summary['logp_gap_max'] or 0.0:.2g} nats\n"
        f"look: {config.run_dir}/report.html   metrics: metrics.jsonl   rollouts: rollouts.sqlite\n"
        f"the trained model, a Hugging Face folder: {config.run_dir}/model-trained"
    )


def main() -> int:
    try:
        return train(parse_arguments(sys.argv[1:]))
    except tuple(expected_errors()) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


def expected_errors() -> list[type[Exception]]:
    """What a user can mend: shown as one message without a traceback."""
    from nanoengine.checkpoint import CheckpointError
    from nanoengine.engine import NonFiniteLoss
    from nanorl.data.store import StoreError
    from nanorl.sandbox.base import SandboxUnavailable

    return [ValueError, OSError, CheckpointError, NonFiniteLoss, StoreError, SandboxUnavailable]


if __name__ == "__main__":
    sys.exit(main())
