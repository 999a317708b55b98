"""`nanorl serve RUN`: the model of a run, or any other, over HTTP, with a page to chat on.

    nanorl serve runs/tiny-seed0
    nanorl serve runs/tiny-seed0 --port 0 --speculate 4

The server is nanoinfer.server, with all its options. Left out: the agent's tools. Whoever calls the
server runs them; `nanorl chat` does.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import tyro

from nanoengine.extras import missing
from nanoinfer.server.config import ServerConfig, ServerOptions


def serve(
    source: tyro.conf.Positional[str],
    /,
    options: Annotated[
        tyro.conf.OmitArgPrefixes[ServerOptions], tyro.conf.arg(name="")
    ] = ServerOptions(),  # noqa: B008 - frozen
) -> None:
    """Serve a model over HTTP in OpenAI's protocol, and a page to chat on.

    Args:
        source: A run's folder, a Hugging Face folder, or a model's name.
        options: The server's.
    """
    try:
        from nanoinfer.server.running import run_server  # here: it imports torch
        from nanorl.commands.serve_page import page_about  # here: it imports torch
    except ModuleNotFoundError as error:
        raise missing("the server", error.name, extra="serve") from None
    from nanorl.run.saved_models import find_models  # here: it imports torch

    saved = find_models(source)
    name = options.model_name or Path(source).expanduser().resolve().name
    options = replace(options, model_name=name)
    if saved.run is not None and not options.default_chat_template_kwargs:  # as it was trained
        from nanorl.envs.catalog import parse_arguments  # here: a plain model needs none

        variables = parse_arguments(saved.run.agent.template_args)
        options = replace(options, default_chat_template_kwargs=json.dumps(variables))
    with saved.folder() as folder:
        print(f"model {name}: {saved.describe()}", flush=True)
        given = {field.name: getattr(options, field.name) for field in fields(ServerOptions)}
        run_server(ServerConfig(model=folder, **given), page_about(saved, folder))
