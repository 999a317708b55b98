"""Serve a model over HTTP: `python -m nanoinfer.server --model DIR`.

Needs the extra `serve` (starlette, uvicorn, pydantic); grammars need `grammar` (llguidance). It
listens on this machine alone unless told otherwise. Next: app.py (routes).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from nanoengine.model.device import enter_device, resolve_device
from nanoengine.model.hf import load_model
from nanoengine.model.lora import merge_lora
from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine

try:
    from nanoinfer.server.app import HttpApp, is_loopback
    from nanoinfer.server.completions import HttpLimits
    from nanoinfer.server.connection import server_config
except ModuleNotFoundError as error:
    MISSING = f"the server needs the package {error.name}; run: pip install -e '.[serve]'"
    raise (SystemExit if __name__ == "__main__" else ImportError)(MISSING) from None

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Serve one model."""

    model: Path
    """Hugging Face folder: config.json, safetensors, tokenizer.json."""
    model_name: str | None = None
    """The name clients use; default: the folder's."""
    lora: Path | None = None
    """Adapter in PEFT's format, merged into the weights at load."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and cache."""
    device: str = "auto"
    """auto (CUDA if there is any), cpu, cuda or cuda:N."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is this machine alone."""
    port: int = 8000
    """0: any free one, printed at the start."""
    api_key_file: Path | None = None
    """File whose content clients must send as their API key; without one the server listens on this
    machine alone, and /pause, /sleep, /abort and the like are closed."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, besides this machine's own, by which clients without a key may call the server."""
    weights_root: Path | None = None
    """/update_weights reads folders below this one; without it the route is closed."""
    threads: int | None = None
    """Threads of torch; default: torch's own choice."""
    infer: InferConfig = field(default_factory=InferConfig)
    limits: HttpLimits = field(default_factory=HttpLimits)


def make_app(config: ServerConfig) -> HttpApp:
    """Load the model and put routes around it. `ValueError` if it would listen to a network without
    asking for a key, or run more threads than the cores could serve."""
    cores = os.cpu_count() or 1
    if config.threads is not None and not 1 <= config.threads <= 4 * cores:
        raise ValueError(
            f"threads={config.threads}: must be 1 to {4 * cores}, 4 for each of the {cores} cores"
        )
    if config.api_key_file is None and not is_loopback(config.host):
        raise ValueError(
            f"host={config.host}: is open to the network; give api_key_file, or listen on 127.0.0.1"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    enter_device(device)
    tokenizer = ChatTokenizer.from_folder(config.model)
    model = load_model(config.model, DTYPES[config.dtype], str(device))
    if config.lora is not None:
        merge_lora(model, config.lora)
    engine = LLMEngine(model, config.infer, tokenizer=tokenizer)
    return HttpApp(
        AsyncEngine(engine),
        tokenizer,
        model_name=config.model_name or config.model.resolve().name,
        limits=config.limits,
        api_key=_read_key(config.api_key_file),
        weights_root=config.weights_root,
        allowed_hosts=config.allowed_hosts,
    )


def _read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    key = file.read_text(encoding="utf-8").strip()
    if not key or not key.isascii():
        raise ValueError(f"{file}: the API key must be one line of ASCII text, not empty")
    return key


def main() -> None:
    import tyro
    import uvicorn

    config = tyro.cli(ServerConfig, prog="python -m nanoinfer.server")
    try:
        app = make_app(config)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    uvicorn.Server(server_config(app, config.limits, config.host, config.port)).run()


if __name__ == "__main__":
    main()
