"""`nanorl train`: trains an agent, evaluates it before and after, and writes a run's folder.

    nanorl train --preset tiny
    nanorl train --env maze.py --rl.steps 20 --out runs/maze

Exit status: 0 finished, 2 something was wrong (one message says what and how to mend it),
130 stopped with Ctrl-C (saved, unless it was pressed three times; the message says how to go on).
`run_training` is what the library calls (nanorl/commands/api.py).
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from nanoengine.stop_signals import EXIT_STATUS, Interrupted
from nanorl.observability.report.next_steps import how_to_go_on, next_steps
from nanorl.options.run_config import RunConfig
from nanorl.run.parse import parse_arguments

if TYPE_CHECKING:
    from nanorl.distributed.roles.base import Roles
    from nanorl.options.parts import Parts
    from nanorl.run.restarts import RunToEnd


def run_training(
    config: RunConfig,
    *,
    env: object = None,
    run_to_end: RunToEnd = asyncio.run,
    is_program: bool = False,
) -> tuple[RunConfig, dict[str, Any]]:
    """Train. Returns the options with what was chosen for this machine, and the summary.

    `env` is an environment given as an object; `run_to_end` runs a coroutine to its end;
    `is_program` says that this process is there for the run, and ends with it.
    """
    import torch  # here, and what imports it, so that a wrong flag is answered at once

    from kernels.torch.allocator import reuse_large_buffers
    from nanoengine.state.run_folder import RunFolder
    from nanorl.distributed.roles.choose_roles import make_roles
    from nanorl.observability.trackers.services import require_trackers
    from nanorl.options.parts import Parts
    from nanorl.options.run_kind import settle_sandbox
    from nanorl.run.continuation import begin, take_over
    from nanorl.run.failed_start import WRITTEN, take_away_failed_start
    from nanorl.run.restarts import run_until_done
    from nanorl.run.run_outcome import write_outcome

    require_trackers(config.log)
    reuse_large_buffers()
    torch.set_num_threads(1)  # of this thread; see parts.py
    with RunFolder(
        config.run_dir,
        is_resumed=config.resume,
        written=WRITTEN,
        take_away=take_away_failed_start,
    ) as folder:
        if folder.is_begun_anew:
            print(f"{config.run_dir}: a run that failed at its start is now in failed-start-*")
        if config.fork and not config.resume:
            take_over(config)
        parts = Parts(config, env=env)
        config, walls = settle_sandbox(parts.config, parts.kind)
        parts.config = config
        if config.rl.steps:  # tasks that must not be trained on are refused here
            for source in getattr(parts.tasks.train, "sources", {"": parts.tasks.train}).values():
                source.batch(0, 1)

        def first_roles() -> Roles:
            roles = make_roles(parts)  # before anything is written: they may refuse the options
            try:
                begin(folder, config)
                print("\n".join(first_lines(parts, walls)), flush=True)
            except BaseException:  # Ctrl-C too: the roles run already
                roles.close()
                raise
            return roles

        title = f"{config.preset}, seed {config.seed}"
        state = run_until_done(parts, first_roles, title, run_to_end, is_program=is_program)
        summary = write_outcome(state)
    return config, summary


def first_lines(parts: Parts, walls: str) -> list[str]:
    """The lines that a run prints before it begins: the model and where it is from, the sandbox
    (`walls`, empty where no programs run), its folder and device, and whether there are fewer tasks
    than wanted."""
    from nanorl.run.cards.model_source import model_source  # here: it imports torch
    from nanorl.run.heldout_success import too_few  # here: the help is faster without

    config = parts.config
    lines = {
        "model": model_source(config, parts.folder).text,
        "sandbox": walls,
        "run directory": str(config.run_dir),
        "device": config.device,
    }
    note = too_few(parts.tasks.heldout, config.evaluation.num_tasks)
    return [*(f"{name}: {text}" for name, text in lines.items() if text), *([note] if note else [])]


def train(config: RunConfig) -> int:
    """Train, and say what came of it."""
    config, summary = run_training(config, is_program=True)
    report(config, summary)
    return 0


def report(config: RunConfig, summary: dict[str, Any]) -> None:
    """Print the success rates, where everything is, and what to do next."""
    # Here: the help is faster without.
    from nanorl.observability.report.summary import (
        environment_lines,
        gap_text,
        success_rates,
    )

    print("\nsuccess on held-out tasks, never trained on, greedy:")
    for title, rate, num_tasks in success_rates(summary):
        figure = "not measured" if rate is None else f"{rate:6.1%} of {num_tasks}"
        print(f"  {title:<22} {figure}")
    for line in environment_lines(summary):
        print(f"  {line}")
    print(
        f"time {summary['wall_s'] / 60:.1f} min, engine-trainer log-prob gap "
        f"{gap_text(summary)}\n"
        f"look: {config.run_dir}/report.html   metrics: metrics.jsonl   rollouts: rollouts.sqlite\n"
        f"the trained model, a Hugging Face folder: {config.run_dir}/model-trained"
    )
    for one in summary.get("findings", ()):
        print(f"{one['severity']}: {one['seen']}: {one['why']}\n  -> {one['remedy']}")
    print(next_steps(config))


def main(arguments: list[str] | None = None) -> int:
    """The command. `arguments` None: those of the process."""
    config = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        return train(config)
    except (Interrupted, KeyboardInterrupt) as stop:
        print(how_to_go_on(config, has_saved=isinstance(stop, Interrupted)))
        return EXIT_STATUS
