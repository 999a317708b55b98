"""The options of the server, and the limits that it holds its clients to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nanoinfer.config import InferConfig
from nanoinfer.http.http_limits import HttpLimits


@dataclass(frozen=True, kw_only=True)
class CompletionLimits(HttpLimits):
    """The most that one client may ask for."""

    max_choices: int = 1024
    """Texts in a guided_choice."""
    max_grammar_chars: int = 1 << 16
    """Length of a grammar, of all choices together: what a client may make the server compile."""
    max_completions: int = 1024
    """Completions in flight, waiting ones included; more are answered 429."""
    max_completions_per_request: int = 128
    """Prompts times n of one request."""
    max_images: int = 256
    """Pictures in one request to a model that sees, those of its history included."""


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
    default_chat_template_kwargs: str = ""
    """Variables of the chat template where a request names no others, as JSON:
    {"enable_thinking": false}."""
    threads: int | None = None
    """Threads of torch; default: torch's own choice."""
    infer: InferConfig = field(default_factory=InferConfig)
    limits: CompletionLimits = field(default_factory=CompletionLimits)

    @property
    def has_key(self) -> bool:
        """Clients are asked for one."""
        return self.api_key_file is not None or self.admin_key_file is not None


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ServerOptions):
    """Serve one model."""

    model: Path
    """Hugging Face folder: config.json, safetensors, tokenizer.json."""
