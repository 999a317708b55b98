"""The options of the server, and the limits that it holds its clients to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from nanoinfer.config import InferConfig


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """The most that one client may ask for."""

    max_body_bytes: int = 4 << 20
    """Longest request body."""
    max_connections: int = 2048
    """Connections at a time; more are closed at once."""
    max_head_bytes: int = 16 << 10
    """Length of the head of a request: its address and its headers."""
    max_headers: int = 100
    """Lines of a head. As Apache's LimitRequestFields."""
    head_timeout_s: float = 10.0
    """The head of a request must have arrived within this time; the connection is closed
    otherwise."""
    max_choices: int = 1024
    """Texts in a guided_choice."""
    max_grammar_chars: int = 1 << 16
    """Length of a grammar, of all choices together: what a client may make the server compile."""
    body_timeout_s: float = 30.0
    """A body must have arrived within this time."""
    send_timeout_s: float = 60.0
    """A client must take some of its answer within this time; the connection is closed and the
    request aborted otherwise. As nginx's send_timeout."""
    request_timeout_s: float = 600.0
    """A completion must have ended within this time; it is aborted otherwise."""
    max_completions: int = 1024
    """Completions in flight, waiting ones included; more are answered 429."""
    max_completions_per_request: int = 128
    """Prompts times n of one request."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if not 0 < getattr(self, one.name) < math.inf:
                raise ValueError(
                    f"--limits.{one.name.replace('_', '-')} {getattr(self, one.name)}: must be "
                    "positive and finite"
                )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Everything about a server but its model."""

    model_name: str | None = None
    """The name clients use; default: the folder's."""
    lora: Path | None = None
    """Adapter in PEFT's format, merged into the weights at load."""
    adapters: tuple[str, ...] = ()
    """Adapters in PEFT's format beside the weights, as name=folder; a client names one as its
    model."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """The dtype of weights and cache. auto: what the folder's config.json says, else its tensors;
    fp16 becomes float32, which holds each of its numbers."""
    device: str = "auto"
    """auto (CUDA if there is any), cpu, cuda or cuda:N."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is this machine alone."""
    port: int = 8000
    """0: any free one, printed at the start."""
    api_key_file: Path | None = None
    """File whose content clients must send as their API key; without any key the server listens on
    this machine alone."""
    admin_key_file: Path | None = None
    """File with the key of the weights' owner. It opens every route; /pause, /sleep, /abort,
    /update_weights and the like it alone opens: without it they are closed."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, besides this machine's own, by which clients without a key may call the server."""
    weights_root: Path | None = None
    """/update_weights and the loading of adapters read folders below this one; without it these
    routes are closed."""
    threads: int | None = None
    """Threads of torch; default: torch's own choice."""
    infer: InferConfig = field(default_factory=InferConfig)
    limits: HttpLimits = field(default_factory=HttpLimits)

    @property
    def has_key(self) -> bool:
        """Clients are asked for one."""
        return self.api_key_file is not None or self.admin_key_file is not None


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ServerOptions):
    """Serve one model."""

    model: Path
    """Hugging Face folder: config.json, safetensors, tokenizer.json."""
