"""A server from its options: load, listen, say where the page is, serve until it is stopped.

Left out: several processes, which a proxy in front may share the requests out to.
"""

from __future__ import annotations

import logging
import socket

import uvicorn

from nanoinfer.server.access import require_key
from nanoinfer.server.app import make_app
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.connection import server_config
from nanoinfer.server.listening import bind
from nanoinfer.server.page import PageAbout


class _Server(uvicorn.Server):
    """Says where it listens once it does, to the person and in the log, where uvicorn names a
    socket that it was given by its number only: `port` 0 is any free one."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            logging.getLogger("uvicorn.error").info("Listening on http://%s:%s", shown, port)
            print(f"chat at http://{shown}:{port}/ (OpenAI's protocol: /v1)", flush=True)


def run_server(config: ServerConfig, about: PageAbout | None = None) -> None:
    """Serve until Ctrl-C; `about` is for the page. `ValueError` for options that cannot be, before
    anything is loaded."""
    require_key(config.host, has_key=config.has_key)
    with bind(config.host, config.port) as listener:
        app = make_app(config)
        if about is not None:
            app.about = about
        given = server_config(app.starlette(), config.limits, config.host, config.port)
        _Server(given).run(sockets=[listener])
