"""Supervised fine-tuning, DPO and reward models from the command line:
`nanoengine/sft/sft_run.py` does the work.

With more than one process in the layout this program starts them on this machine and waits for
them, unless torchrun started it (several machines, Slurm). Ctrl-C reaches this process alone, which
asks the others. Exit status: 0 finished, 2 something to mend (one message says what), 130 Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import tyro

import nanorl  # noqa: F401  (what threads of PyTorch do is said before it is loaded)
from nanoengine.command_line import WRONG, plain_errors
from nanoengine.sft.sft_config import SftConfig
from nanoengine.sft.sft_run import SftRank, SftRun, check_model


def parse(arguments: list[str]) -> SftConfig:
    prog = "bash scripts/train_sft.sh"
    with plain_errors(arguments):
        config = tyro.cli(SftConfig, args=arguments, prog=prog)
    if not config.resume:
        _ = config.examples_file  # said, and of the kind that the loss reads
        return config
    run = SftConfig.of_run(config.out)
    resumed = tyro.cli(SftConfig, default=run, args=arguments, prog=prog)
    resumed.check_resumes(run)
    return resumed


async def train_on_ranks(config: SftConfig) -> None:
    """Each process of the layout on this machine; raises what they raise, as `SftRun` does."""
    from nanoengine.parallel.device import resolve_device
    from nanoengine.stop_signals import Interrupted, StopSignals
    from nanorl.distributed.roles.role_ranks import results, start_ranks
    from nanosched import Scheduler

    # Here, so that one message says it and not each rank's.
    is_gpu = resolve_device(config.device, num_local=config.world).type == "cuda"
    places = [((config, rank), dict[str, Any]()) for rank in range(config.world)]
    loop = asyncio.get_running_loop()
    with Scheduler(backend="local", preload=["nanoengine.sft.sft_run"]) as sched:
        ranks = sched.group(SftRank, places, num_cpus=0, num_gpus=int(is_gpu))
        await start_ranks(ranks)
        ask = lambda: loop.call_soon_threadsafe(ranks.call, SftRank.stop)  # noqa: E731
        with StopSignals(on_stop=ask, is_program=True):
            is_finished = await results(ranks, ranks.call(SftRank.take_steps))
        await results(ranks, ranks.call(SftRank.finish))
    if not all(is_finished):
        raise Interrupted


def launch(config: SftConfig) -> None:
    """Run on several processes, which share the cores unless the user divided them."""
    check_model(config)
    threads = max(1, len(os.sched_getaffinity(0)) // config.world)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read by the processes started next
    asyncio.run(train_on_ranks(config))


def main() -> int:
    from nanoengine.engine import NonFiniteLoss
    from nanoengine.state.tensor_file import CheckpointError
    from nanoengine.stop_signals import EXIT_STATUS, Interrupted
    from nanosched import WorkerDied

    arguments = sys.argv[1:]
    try:
        config = parse(arguments)
        if config.world > 1 and "RANK" not in os.environ:
            launch(config)
        else:
            SftRun(config).train(is_program=True)
        return 0
    except Interrupted:
        command = f"bash scripts/train_sft.sh --resume --out {config.out}"
        print(f"\nstopped and saved; go on with: {command}", file=sys.stderr)
        return EXIT_STATUS
    except KeyboardInterrupt:  # before the first step or in the export
        print("\nstopped; nothing was lost, go on with --resume", file=sys.stderr)
        return EXIT_STATUS
    except WorkerDied as error:
        command = f"bash scripts/train_sft.sh --resume --out {config.out}"
        print(f"error: {error}; go on from the last checkpoint: {command}", file=sys.stderr)
        return WRONG
    except (ValueError, OSError, CheckpointError, NonFiniteLoss) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG


if __name__ == "__main__":
    sys.exit(main())
