"""Supervised fine-tuning on a jsonl file of chats, in one process or split over many.

Packed micro-batches, loss on the assistant's tokens alone, resumable bit for bit in the same layout
and in any other up to the order of sums. A run directory holds config.json, metrics.jsonl (one line
a step), checkpoints/ and, at the end, model/ (a Hugging Face folder).

With more than one process in the layout this program starts them with torchrun, unless torchrun
started it. Exit status: 0 finished, 1 something to mend (one message says what), 130 Ctrl-C.
Next: sft_run.py (what each process does).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

LAYOUT = ("tp", "pp", "dp", "cp", "ep", "zero", "sequence_parallel", "schedule", "chunks")
FREE_ON_RESUME = (
    *(*LAYOUT, "out", "resume", "save_every", "micro_batch_tokens", "peak_flops"),
    "device",  # another one rounds differently, as another layout does
)


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Fine-tune a model on chats."""

    data: Path | None = None
    """jsonl: {"messages": [{"role": ..., "content": ...}, ...]} a line."""
    model: str = "smollm2-135m-instruct"
    """Hugging Face folder, or a name that resolves to one."""
    out: Path = Path("runs/sft")
    resume: bool = False
    """Go on from the last checkpoint in --out."""
    steps: int = 100
    """Optimizer steps."""
    batch_size: int = 16
    """Chats a step, over all processes."""
    max_tokens: int = 2048
    """Longer chats are left out."""
    micro_batch_tokens: int = 2048
    """Rows of one forward and backward pass of one process."""
    lr: float = 2e-5
    schedule_lr: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: int = 10
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    dtype: Literal["fp32", "bf16"] = "fp32"
    activation_checkpointing: bool = False
    device: str = "auto"
    """auto (CUDA if there is any), cpu, cuda or cuda:N; each process takes a GPU of its own."""
    seed: int = 0
    save_every: int = 50
    """Steps between checkpoints, written in the background; one more at the end."""
    tp: int = 1
    """Processes that share each matrix."""
    pp: int = 1
    """Processes that share the layers."""
    dp: int = 1
    """Processes with samples of their own."""
    cp: int = 1
    """Processes that share the tokens of a sequence."""
    ep: int = 1
    """Processes that share the experts of a mixture, with samples of their own."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the dp (and cp) processes share: 1 optimizer state, 2 gradients, 3 parameters."""
    sequence_parallel: bool = False
    """With tp: cut the rows between matrices too."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1"] = "1f1b"
    """Of the pipeline."""
    chunks: int = 1
    """Layer groups a pipeline process (interleaved)."""
    peak_flops: float | None = None
    """Of one process's device; with it the MFU is reported."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp * self.ep

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "max_tokens",
            "save_every",
            "tp",
            "pp",
            "dp",
            "cp",
            "ep",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")

    def to_json(self) -> dict[str, Any]:
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }


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
    from sft_run import SftRun

    from nanoengine.checkpoint import CheckpointError
    from nanoengine.engine import NonFiniteLoss
    from nanoengine.model.device import resolve_device
    from nanoengine.stop_signals import EXIT_STATUS, Interrupted

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
