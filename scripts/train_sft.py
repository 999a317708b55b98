"""Supervised fine-tuning on a jsonl file of chats, in one process or split over many.

Packed micro-batches, loss on the assistant's tokens alone, resumable bit for bit in the same layout
and in any other up to the order of sums. A run directory holds config.json, metrics.jsonl (one line
a step), checkpoints/ and, at the end, model/ (a Hugging Face folder).

With more than one process in the layout this program starts them with torchrun, unless torchrun
started it. Exit status: 0 finished, 1 something to mend (one message says what), 130 Ctrl-C.
Next: sft_run.py (what each process does).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tyro

from nanoengine.sft_run import SftConfig

LAYOUT = ("tp", "pp", "dp", "cp", "ep", "zero", "sequence_parallel", "schedule", "chunks")
FREE_ON_RESUME = (
    *(*LAYOUT, "out", "resume", "save_every", "micro_batch_tokens", "peak_flops"),
    "device",  # another one rounds differently, as another layout does
)


def parse(arguments: list[str]) -> SftConfig:
    config = tyro.cli(SftConfig, args=arguments, prog="bash scripts/train_sft.sh")
    if not config.resume:
        if config.data is None:
            raise ValueError("data: missing; give a jsonl file of chats with --data FILE")
        return config
    file = config.out / "config.json"
    if not file.is_file():
        raise ValueError(f"--resume: {file} does not exist; name the run's folder with --out")
    saved = json.loads(file.read_text())
    saved |= {"data": Path(saved["data"]), "out": config.out, "resume": True}
    resumed = tyro.cli(
        SftConfig, default=SftConfig(**saved), args=arguments, prog="bash scripts/train_sft.sh"
    )
    for name, value in resumed.to_json().items():
        if name not in FREE_ON_RESUME and value != json.loads(file.read_text())[name]:
            raise ValueError(
                f"--resume: {name}={value} differs from the run's {saved[name]}; leave it out, "
                "or start another run"
            )
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
    from nanoengine.sft_run import SftRun
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
