"""The options of a supervised run, whatever it learns from: chats, or pairs of answers.

Left out: reading the command line (scripts/train_sft.py), the files of examples (chats.py,
preferences.py). Next: objective.py, sft_run.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from nanoengine.config import EngineConfig
from nanoengine.parallel.layout import LayoutConfig

LossName = Literal["sft", "dpo", "reward_model"]
LEARNING_RATES = {"sft": 2e-5, "dpo": 1e-6, "reward_model": 1e-5}
LAYOUT = ("tp", "pp", "dp", "cp", "ep", "zero", "sequence_parallel", "schedule", "chunks")
FREE_ON_RESUME = (
    *(*LAYOUT, "out", "resume", "save_every", "micro_batch_tokens", "peak_flops"),
    "device",  # another one rounds differently, as another layout does
)


@dataclass(frozen=True, kw_only=True)
class SftConfig(LayoutConfig):
    """Fine-tune a model on chats, or on which of two answers is better."""

    loss: LossName = "sft"
    """sft: what the assistant wrote in --data. dpo: the better answers of --preferences rather than
    the others. reward_model: a score by which the better answers have more."""
    data: Path | None = None
    """Of sft, jsonl: {"messages": [{"role": ..., "content": ...}, ...]} a line."""
    preferences: Path | None = None
    """Of dpo and reward_model, jsonl: {"prompt": ..., "chosen": ..., "rejected": ...} a line."""
    beta: float = 0.1
    """Of dpo: nats of reward for a nat by which an answer became likelier than it was."""
    label_smoothing: float = 0.0
    """Of dpo and reward_model: the share of pairs that are taken to be the wrong way round."""
    model: str = "smollm2-135m-instruct"
    """Hugging Face folder, or a name that resolves to one."""
    out: Path = Path("runs/sft")
    resume: bool = False
    """Go on from the last checkpoint in --out."""
    steps: int = 100
    """Optimizer steps."""
    batch_size: int = 16
    """Chats, or pairs, a step, over all processes."""
    max_tokens: int = 2048
    """Longer chats are left out, and pairs of which one answer makes a longer chat."""
    micro_batch_tokens: int = 2048
    """Rows of one forward and backward pass of one process; a longer chat, or pair, has one of its
    own."""
    lr: float | None = None
    """None: 2e-5 for sft, 1e-6 for dpo, 1e-5 for reward_model."""
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
    peak_flops: float | None = None
    """What one process's device can do a second; with it the MFU is reported."""

    @property
    def world(self) -> int:
        return self.layout.world

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "max_tokens", "save_every", "tp", "pp", "dp", "cp", "ep")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.loss not in get_args(LossName):
            raise ValueError(f"loss={self.loss!r}: must be one of {', '.join(get_args(LossName))}")
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta={self.beta}: must be positive and finite")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing={self.label_smoothing}: must be at least 0 and below 0.5, where "
                "pairs say nothing any more"
            )
        if self.loss != "sft" and self.cp > 1:
            raise ValueError(
                f"loss={self.loss!r} with cp={self.cp}: the answers of a pair share their prompt, "
                "which is not cut over processes; set cp to 1"
            )
        if self.loss == "reward_model" and max(self.tp, self.pp, self.ep) > 1:
            raise ValueError(
                f"loss='reward_model' with tp={self.tp}, pp={self.pp}, ep={self.ep}: every process "
                "has the whole model; use dp and zero"
            )
        for name in ("lr", "weight_decay", "max_grad_norm", "peak_flops"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: must be 0 or positive, and finite")

    @property
    def examples_file(self) -> Path:
        """The file that the loss reads. ValueError where it, or what it does not read, is said."""
        wanted, other = self.data, self.preferences
        name, content, stranger = "data", "chats", "preferences"
        if self.loss != "sft":
            wanted, other = other, wanted
            name, content, stranger = stranger, "pairs of answers", name
        if other is not None:
            raise ValueError(
                f"{stranger}: loss={self.loss!r} does not read it; leave --{stranger} out, or "
                f"choose --loss {'dpo or reward_model' if self.loss == 'sft' else 'sft'}"
            )
        if wanted is None:
            raise ValueError(f"{name}: missing; give a jsonl file of {content} with --{name} FILE")
        return wanted

    @property
    def engine_config(self) -> EngineConfig:
        """The options of the training engine."""
        return EngineConfig(
            dtype=self.dtype,
            lr=LEARNING_RATES[self.loss] if self.lr is None else self.lr,
            schedule=self.schedule_lr,
            warmup_steps=min(self.warmup_steps, self.steps - 1),
            total_steps=self.steps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            micro_batch_tokens=self.micro_batch_tokens,
            activation_checkpointing=self.activation_checkpointing,
            zero=self.zero,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def of_run(cls, out: Path) -> SftConfig:
        """Read the options of the run in the folder `out`, to be resumed there."""
        file = out / "config.json"
        if not file.is_file():
            raise ValueError(f"--resume: {file} does not exist; name the run's folder with --out")
        saved = json.loads(file.read_text())
        files = {name: Path(saved[name]) for name in ("data", "preferences") if saved.get(name)}
        return cls(**saved | files | {"out": out, "resume": True})

    def check_resumes(self, run: SftConfig) -> None:
        """`ValueError` if this is not `run` with changes that leave its result the same (up to the
        order of sums)."""
        theirs = run.to_json()
        for name, value in self.to_json().items():
            if name not in FREE_ON_RESUME and value != theirs[name]:
                raise ValueError(
                    f"--resume: {name}={value} differs from the run's {theirs[name]}; leave it "
                    "out, or start another run"
                )
