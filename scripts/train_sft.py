"""Supervised fine-tuning from the command line: `nanoengine/sft_run.py` does the work.

With more than one process in the layout this program starts them with torchrun, unless torchrun
started it. Exit status: 0 finished, 1 something to mend (one message says what), 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys

import tyro

from nanoengine.sft_run import SftConfig, SftRun


def parse(arguments: list[str]) -> SftConfig:
    prog = "bash scripts/train_sft.sh"
    config = tyro.cli(SftConfig, args=arguments, prog=prog)
    if not config.resume:
        if config.data is None:
            raise ValueError("data: missing; give a jsonl file of chats with --data FILE")
        return config
    run = SftConfig.of_run(config.out)
    resumed = tyro.cli(SftConfig, default=run, args=arguments, prog=prog)
    resumed.check_resumes(run)
    return resumed


def launch(config: SftConfig, arguments: list[str]) -> int:
    """Replace this process by torchrun, which starts the layout's processes on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(config.world), __file__, *arguments]
    threads = max(1, len(os.sched_getaffinity(0)) // config.world)
    os.execvpe(sys.executable, command, {"OMP_NUM_THREADS": str(threads), **os.environ})


def main() -> int:
    from nanoengine.engine import NonFiniteLoss
    from nanoengine.model.device import resolve_device
    from nanoengine.stop_signals import EXIT_STATUS, Interrupted
    from nanoengine.tensor_file import CheckpointError

    arguments = sys.argv[1:]
    try:
        config = parse(arguments)
        if config.world > 1 and "RANK" not in os.environ:
            resolve_device(config.device, num_local=config.world)  # or one message, not each one's
            return launch(config, arguments)
        SftRun(config).train()
        return 0
    except Interrupted:
        command = f"bash scripts/train_sft.sh --resume --out {config.out}"
        print(f"\nstopped and saved; go on with: {command}", file=sys.stderr)
        return EXIT_STATUS
    except KeyboardInterrupt:  # before the first step or in the export
        print("\nstopped; nothing was lost, go on with --resume", file=sys.stderr)
        return EXIT_STATUS
    except (ValueError, OSError, CheckpointError, NonFiniteLoss) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
