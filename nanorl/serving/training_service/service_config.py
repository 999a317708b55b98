"""The options of the training service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nanoinfer.config import InferConfig
from nanorl.bounds import COUNT, NATURAL, POSITIVE, Bound, check_record


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Everything about a training service but its model."""

    checkpoints: Path = Path("runs/training-service")
    """Folder of all that clients save; tinker:// paths are below it."""
    full: bool = False
    """Train all parameters of every model, whatever adapter its client asks for."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """The dtype of training and sampling."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is this machine alone."""
    port: int = 8000
    """0: any free one, printed at the start."""
    api_key_file: Path | None = None
    """File with the keys that clients must have as TINKER_API_KEY, NAME:tml-... on a line for each:
    what one has made, no other sees. Without it the service listens on this machine alone, and
    makes a key for its user: CHECKPOINTS/api_key.txt."""
    threads: int | None = None
    """Threads of torch; default: torch's own choice."""
    micro_batch_tokens: int = 2048
    """Tokens of one training micro-batch."""
    max_models: int = 16
    """Models that are trained at a time, of all clients."""
    max_samplers: int = 2
    """Inference engines, each with one snapshot of the weights."""
    keep_snapshots: int = 8
    """Snapshots without a name (save_weights_and_get_sampling_client) that a model keeps."""
    session_timeout_s: float = 3600.0
    """A session that sends nothing for so long, not even a heartbeat, may lose its models."""
    max_body_bytes: int = 64 << 20
    """Longest request body."""
    poll_s: float = 20.0
    """How long a fetch of a future waits for it before the client has to ask again."""
    max_answer_bytes: int = 256 << 20
    """Answers that are kept for a client that asks again."""
    infer: InferConfig = field(default_factory=InferConfig)

    def __post_init__(self) -> None:
        check_record(
            self,
            "",
            port=Bound(0, 65535, "a port has 16 bits"),
            max_models=COUNT,
            max_samplers=COUNT,
            keep_snapshots=COUNT,
            session_timeout_s=POSITIVE,
            max_body_bytes=COUNT,
            poll_s=NATURAL,
            max_answer_bytes=NATURAL,
        )


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(ServiceOptions):
    """Train one base model."""

    model: Path
    """Hugging Face folder: config.json, safetensors, tokenizer.json."""
    names: tuple[str, ...] = ()
    """What clients may call it, besides the path of its folder."""

    @property
    def base_name(self) -> str:
        """The name by which the service calls the model: a hub's, from which clients get the
        tokenizer, else the path of the folder, from which they do as well."""
        for name in self.names:
            if name.count("/") == 1 and not Path(name).expanduser().exists():
                return name
        return str(self.model.expanduser().resolve())
