"""`nanorl serve-env ENV`: an environment over HTTP, for runs elsewhere.

    nanorl serve-env maze.py --port 8900
    nanorl train --env http://127.0.0.1:8900

ENV is what `--env` takes. Exit status as of every verb. Left out: the agent and its model; the run
that asks has them.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from nanoengine.extras import missing
from nanoinfer.http.api_key import read_key
from nanorl.bounds import POSITIVE, check_record
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import run_kind


@dataclass(frozen=True, kw_only=True)
class ServeEnvOptions:
    """The way in which an environment is served."""

    args: tuple[str, ...] = ()
    """Its arguments, as name=value."""
    reward: str = ""
    """A reward in place of the environment's own."""
    reward_args: tuple[str, ...] = ()
    """Its arguments, as name=value."""
    model: str = ""
    """The model that will play, where there are tools: its chat template says how it calls them."""
    workers: int | None = None
    """Processes for code of yours; 0: this one; None: two, and none for what comes along."""
    deadline_s: float = 60.0
    """Wall-clock limit of one call in such a process."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is this machine alone."""
    port: int = 8900
    """0: any free one, printed at the start."""
    api_key_file: Path | None = None
    """File whose content clients must send as their API key; other machines need one."""
    max_episodes: int = 1024
    """Episodes at a time."""
    idle_s: float = 900.0
    """An episode that nobody asks for this long is closed."""
    takes_tasks: bool = False
    """Play tasks that clients made up as well, their answers, files and data; otherwise only those
    that this server drew."""

    def __post_init__(self) -> None:
        check_record(self, "", deadline_s=POSITIVE, idle_s=POSITIVE)


def serve_env(
    env: tyro.conf.Positional[str],
    /,
    options: Annotated[
        tyro.conf.OmitArgPrefixes[ServeEnvOptions], tyro.conf.arg(name="")
    ] = ServeEnvOptions(),
) -> None:
    """Serve an environment over HTTP: `nanorl train --env http://...` plays in it.

    Args:
        env: A name of ours, a file, or module:Class.
        options: The server's.
    """
    try:
        import nanorl.serving.env_server  # noqa: F401 - what it needs may be missing
    except ModuleNotFoundError as error:
        raise missing("the server", error.name, extra="serve") from None
    config = replace(
        get_preset("tiny").config(),
        env=env,
        env_args=options.args,
        reward=options.reward,
        reward_args=options.reward_args,
        env_workers=options.workers,
        env_deadline_s=options.deadline_s,
    )
    with ExitStack() as stack:
        folder = _tokenizer_folder(config, options.model, stack)
        asyncio.run(_serve(config, folder, options))


async def _serve(config: RunConfig, folder: Path, options: ServeEnvOptions) -> None:
    from nanorl.options.agent_kit import AgentKit  # here: the help is faster without
    from nanorl.serving.env_server import EnvServer, ServeLimits  # here: it imports an extra

    limits = ServeLimits(
        max_episodes=options.max_episodes,
        idle_s=options.idle_s,
        call_s=2 * options.deadline_s,
        takes_tasks=options.takes_tasks,
    )
    key = read_key(options.api_key_file)
    kit = AgentKit(config, folder)
    try:
        server = EnvServer(kit, limits, key, secret=kept_secret(config.cache_dir.expanduser()))
        stop = _stop_signals()  # before anyone can know that it listens
        async with server.listening(options.host, options.port) as url:
            print(f"environment {kit.kind.name} at {url}", flush=True)
            await stop.wait()
            print("stopped", flush=True)
    finally:
        kit.close()


def kept_secret(folder: Path) -> bytes:
    """The key that seals tasks, from a file that only its owner reads, so that clients can go on
    after a restart; made if it is not there, and b"" where none can be kept."""
    file = folder / "serve-env.key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists() or not file.stat().st_size:  # it is new, or its maker was killed
            with open(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as new:
                fcntl.flock(new, fcntl.LOCK_EX)  # another server may be about to write it
                if not new.read():
                    new.write(secrets.token_bytes(32))
        found = file.read_bytes()
        return found if len(found) == 32 and file.stat().st_uid == os.geteuid() else b""
    except OSError:
        return b""


def _stop_signals() -> asyncio.Event:
    """Set by Ctrl-C or SIGTERM; what the server holds is then given back in order."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


def _tokenizer_folder(config: RunConfig, model: str, stack: ExitStack) -> Path:
    """The folder of the model that plays; any tokenizer will do where nothing depends on it."""
    from nanoengine.formats.sources import resolve_model  # here: it imports torch
    from nanorl.envs.tasks.tiny_model import build_tiny_model  # here: it imports torch

    if model:
        return resolve_model(model, config.cache_dir.expanduser())
    kind = run_kind(config)
    try:
        if kind.has_tools:
            raise ValueError(
                f"--model: {config.env} has tools, and how they are called is the model's; name "
                "the one that will play: --model Qwen/Qwen3-0.6B"
            )
    finally:
        kind.close()
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="nanorl-serve-env-"))
    return build_tiny_model(Path(scratch) / "model")
