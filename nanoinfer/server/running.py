"""A server from its options: load, listen, say where the page is, serve until it is stopped.

Left out: several processes, which a proxy in front may share the requests out to.
"""

from __future__ import annotations

import logging

from nanoinfer.http.connection import server_config
from nanoinfer.http.listening import bind
from nanoinfer.http.serving import ProgramServer
from nanoinfer.server.app import make_app
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.page import PageAbout


def run_server(config: ServerConfig, about: PageAbout | None = None) -> None:
    """Serve until Ctrl-C; `about` is for the page. `ValueError` for options that cannot be, before
    anything is loaded."""
    with bind(config.host, config.port) as listener:
        app = make_app(config)
        if about is not None:
            app.about = about
        given = server_config(app.starlette(), config.limits, access_log=True)
        ProgramServer(given, _say).run(sockets=[listener])


def _say(url: str) -> None:
    """To the person and in the log."""
    logging.getLogger("uvicorn.error").info("Listening on %s", url)
    print(f"chat at {url}/ (OpenAI's protocol: /v1)", flush=True)
