"""A training service from its options: listen, say where, serve until it is stopped."""

from __future__ import annotations

import socket

from nanoinfer.http.connection import server_config
from nanoinfer.http.listening import bind
from nanoinfer.http.serving import ProgramServer
from nanorl.serving.training_service.keys import OWN_FILE
from nanorl.serving.training_service.service_app import ServiceApp, make_app
from nanorl.serving.training_service.service_config import ServiceConfig


class ServiceServer(ProgramServer):
    """Says where it listens once it does, and ends what runs when it stops."""

    def __init__(self, app: ServiceApp, config: ServiceConfig) -> None:
        # No line for each request: clients poll.
        super().__init__(server_config(app.starlette(), app.limits), self._tell)
        self._app, self._config = app, config

    def _tell(self, url: str) -> None:
        print(f"training service at {url} (TINKER_BASE_URL)", flush=True)
        if self._config.api_key_file is None:
            file = self._config.checkpoints.expanduser() / OWN_FILE
            print(f"its key, yours alone: export TINKER_API_KEY=$(cat {file})", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._app.close()
        await super().shutdown(sockets)


def run_service(config: ServiceConfig) -> None:
    """Serve until Ctrl-C, which is raised again at the end. `ValueError` for options that
    cannot be, before anything is loaded."""
    with bind(config.host, config.port) as listener:
        ServiceServer(make_app(config), config).run(sockets=[listener])
