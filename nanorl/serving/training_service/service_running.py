"""A training service from its options: listen, say where, serve until it is stopped."""

from __future__ import annotations

import socket

import uvicorn

from nanoinfer.server.access import require_key
from nanoinfer.server.config import HttpLimits
from nanoinfer.server.connection import server_config
from nanoinfer.server.listening import bind
from nanorl.serving.training_service.keys import OWN_FILE
from nanorl.serving.training_service.service_app import ServiceApp, make_app
from nanorl.serving.training_service.service_config import ServiceConfig


class ServiceServer(uvicorn.Server):
    """Says where it listens once it does, and ends what runs when it stops."""

    def __init__(self, app: ServiceApp, config: ServiceConfig) -> None:
        limits = HttpLimits(max_body_bytes=config.max_body_bytes)
        where = (config.host, config.port)
        # No line for each request: clients poll.
        super().__init__(server_config(app.starlette(), limits, *where, access_log=False))
        self._app, self._config = app, config

    @property
    def url(self) -> str:
        """The URL at which it listens; valid once it has `started`."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(f"training service at {self.url} (TINKER_BASE_URL)", flush=True)
            if self._config.api_key_file is None:
                file = self._config.checkpoints.expanduser() / OWN_FILE
                print(f"its key, yours alone: export TINKER_API_KEY=$(cat {file})", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._app.close()
        await super().shutdown(sockets)


def run_service(config: ServiceConfig) -> None:
    """Serve until Ctrl-C, which is raised again at the end. `ValueError` for options that
    cannot be, before anything is loaded."""
    require_key(config.host, has_key=config.api_key_file is not None)
    with bind(config.host, config.port) as listener:
        ServiceServer(make_app(config), config).run(sockets=[listener])
