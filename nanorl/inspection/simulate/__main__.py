"""What a run would cost: prints it, and draws it.

    python -m nanorl.inspection.simulate --config verl-128-async
    python -m nanorl.inspection.simulate --config mine.json --gpus 8 64 512 --svg mine.svg
    python -m nanorl.inspection.simulate --config verl-128-sync --workload.group-size 8

`--config` is a JSON file or one of the published runs; every option of it can be given as a flag.
Left out: how a configuration is found for a cluster (fit.py, docs/simulation.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from nanoengine.command_line import plain_errors, run_command
from nanorl.inspection.simulate.picture import draw
from nanorl.inspection.simulate.published import config_names, read_config
from nanorl.inspection.simulate.simulation import simulate, with_half_quantum
from nanorl.inspection.simulate.simulation_config import SimulationConfig, scaled


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _simulated(words))


def _simulated(words: list[str]) -> int:
    with plain_errors(words):
        own, rest = _own_options().parse_known_args(words)
        config = tyro.cli(
            SimulationConfig,
            default=read_config(own.config) if own.config else SimulationConfig(),
            args=rest,
            prog="python -m nanorl.inspection.simulate",
            description=_own_options().format_help(),
        )
    configs = [scaled(config, count) for count in own.gpus] if own.gpus else [config]
    _check_files(own)
    _run(configs, own)
    return 0


def _own_options() -> argparse.ArgumentParser:
    names = ", ".join(config_names())
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage="")
    parser.add_argument("--config", help=f"a JSON file, or one of: {names}")
    parser.add_argument("--gpus", type=int, nargs="+", help="simulate the run on so many GPUs each")
    parser.add_argument("--svg", type=Path, help="draw who worked when into this file")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    parser.add_argument("--once", action="store_true", help="do not repeat with half the quantum")
    return parser


def _check_files(own: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before any work is done."""
    for flag in ("svg", "json"):
        path = getattr(own, flag)
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{flag} {path}: there is no folder {path.parent}; make it first")
    if own.svg and own.gpus and len(own.gpus) > 1:
        raise ValueError(f"--svg {own.svg}: a picture is of one run; give one number to --gpus")


def _run(configs: Sequence[SimulationConfig], own: argparse.Namespace) -> None:
    numbers = []
    for config in configs:
        result = simulate(config)
        print(result.text(None if own.once else with_half_quantum(result)), flush=True)
        numbers.append(result.numbers())
        if own.svg:
            own.svg.write_text(draw(result), "utf-8")
    if own.gpus:
        print("The trainer's times are taken to fall in proportion to its GPUs.")
    if own.json:
        own.json.write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
