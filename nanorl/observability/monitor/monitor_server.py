"""The HTTP side of a run, inside its event loop.

    GET    /metrics           for Prometheus
    GET    /status            run and roles as JSON
    POST   /scale             {"replicas": 3}                      control verbs
    POST   /replicas          {"address": "http://gpu3:8000"}
    DELETE /replicas/NAME

All need Authorization: Bearer TOKEN, with the token of RUN/monitor.json; the first two take the key
of --monitor.api-key-file as well. Other users of this machine reach its ports, and a run's figures
and folder are nobody else's to know. A control verb answers when it is done, which for a drained
replica takes as long as its requests; two of them wait for each other. A client that hangs up does
not stop one.
uvicorn runs as a task of the loop and takes no signal: Ctrl-C belongs to the run. It needs the
extra `monitor` (prometheus_client, starlette, uvicorn, pydantic).
Left out: TLS and users (put a proxy in front).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nanoinfer.http.api_error import ApiError, application, known_error
from nanoinfer.http.api_key import read_key
from nanoinfer.http.callers import check_host, check_key
from nanoinfer.http.http_io import Handler, read_body
from nanoinfer.http.http_limits import HttpLimits
from nanoinfer.http.listening import is_loopback, listen, url_of
from nanoinfer.http.scrape import scraped
from nanoinfer.http.serving import ServerInLoop
from nanorl.observability.monitor.board import RunBoard
from nanorl.observability.monitor.exposition import make_registry
from nanorl.observability.monitor.monitor_access import MonitorAccess
from nanorl.observability.monitor.monitor_control import ClusterControl, RoleStatus
from nanorl.observability.monitor.readings import RoleReadings
from nanorl.observability.report.metrics import to_jsonable
from nanorl.options.monitor_config import MonitorConfig

LOG = logging.getLogger("nanorl.observability.monitor")
_LIMITS = HttpLimits(max_body_bytes=1 << 16, max_connections=128)
_CLOSE_S = 2  # a client that still reads when the run ends has so long


class ScaleBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    replicas: int = Field(ge=0, le=1024)


class AddBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    address: str = Field(max_length=1024)


class MonitorServer:
    """Routes over a board and a cluster; `readings` None: the run has one process."""

    def __init__(
        self, config: MonitorConfig, run_dir: Path, board: RunBoard, readings: RoleReadings | None
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._board = board
        self._readings = readings
        self._registry = make_registry(board, self._roles)
        self._verb = asyncio.Lock()
        self._logged: set[str] = set()
        self._token = secrets.token_urlsafe(32)
        self._read_key: str | None = None
        self._access: MonitorAccess | None = None
        self._server: ServerInLoop | None = None

    async def start(self) -> MonitorAccess:
        """Listen, and write monitor.json. `ValueError` for an address that cannot be had, or a file
        that holds no key."""
        assert self._config.port is not None, "the server is off without a port"
        self._read_key = read_key(self._config.api_key_file, flag="--monitor.api-key-file")
        listener = listen(self._config.host, self._config.port, flags="--monitor.")
        self._server = ServerInLoop(self.starlette(), _LIMITS, listener, _CLOSE_S)
        await self._server.begin()
        self._access = MonitorAccess(
            url=url_of(listener, self._config.host),
            token=self._token,
            pid=os.getpid(),
        )
        self._access.write(self._run_dir)
        return self._access

    async def close(self) -> None:
        """Remove monitor.json and stop listening. A verb under way is cancelled."""
        if self._access is not None:
            self._access.remove(self._run_dir)
        if self._server is not None:
            await self._server.end(at_once=False)

    def starlette(self) -> Starlette:
        routes = [
            self._route("/metrics", self._metrics, "GET", is_control=False),
            self._route("/status", self._status, "GET", is_control=False),
            self._route("/scale", self._scale, "POST"),
            self._route("/replicas", self._add, "POST"),
            self._route("/replicas/{name:path}", self._remove, "DELETE"),
        ]
        return application(routes)

    def _route(self, path: str, handler: Handler, method: str, *, is_control: bool = True) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                self._check(request, is_control)
                return await handler(request)
            except Exception as error:  # the border of the process: logged, and told
                return self._explained(error).response()

        return Route(path, endpoint, methods=[method])

    def _check(self, request: Request, is_control: bool) -> None:
        if is_loopback(self._config.host):
            check_host(request)
        readers = [] if is_control or self._read_key is None else [self._read_key]
        told = "wrong or missing token; send Authorization: Bearer TOKEN of monitor.json"
        check_key(request, [self._token, *readers], told)

    def _explained(self, error: Exception) -> ApiError:
        """The error that the client is told. Only a `ValueError` is its own doing. A defect is
        logged once, because whoever scrapes comes back every few seconds."""
        if known := known_error(error, {ValueError: 400}):
            return known
        if isinstance(error, OSError):
            return ApiError(502, f"no answer from there: {error}")
        defect = f"{type(error).__name__}: {error}"
        if defect not in self._logged:
            self._logged.add(defect)
            LOG.error("a request to the monitor failed", exc_info=error)
        return ApiError(500, f"a defect of the run: {defect}")

    def _roles(self) -> Sequence[RoleStatus]:
        return self._readings.roles() if self._readings is not None else ()

    # Reading

    async def _metrics(self, request: Request) -> Response:
        return scraped(request, self._registry)

    async def _status(self, _: Request) -> Response:
        return JSONResponse(self._state())

    def _state(self) -> dict[str, Any]:
        board = self._board
        return {
            "run": str(self._run_dir),
            "pid": os.getpid(),
            "phase": board.phase,
            "step": board.step,
            "quiet_s": board.quiet_s,
            "metrics": to_jsonable(board.metrics),
            "idle": board.idle,
            "roles": [to_jsonable(asdict(role)) for role in self._roles()],
        }

    # Control

    async def _scale(self, request: Request) -> Response:
        body: ScaleBody = await self._read(request, ScaleBody)
        async with self._verb:
            await self._cluster().scale(body.replicas)
        return JSONResponse(self._state())

    async def _add(self, request: Request) -> Response:
        body: AddBody = await self._read(request, AddBody)
        _check_address(body.address)
        async with self._verb:
            name = await self._cluster().add_replica(body.address)
        return JSONResponse({"name": name} | self._state())

    async def _remove(self, request: Request) -> Response:
        name = request.path_params["name"]
        cluster = self._cluster()
        async with self._verb:
            known = sorted(role.name for role in cluster.roles() if role.kind == "replica")
            if name not in known:
                there = ", ".join(known) or "none"
                raise ApiError(404, f"no replica is called {name!r}; there is: {there}", "name")
            await cluster.remove_replica(name)
        return JSONResponse(self._state())

    async def _read(self, request: Request, model: type[Any]) -> Any:
        return await read_body(request, model, _LIMITS)

    def _cluster(self) -> ClusterControl:
        if self._readings is None:
            raise ApiError(
                409, "this run has one process; start it with --cluster.backend local or ray"
            )
        return self._readings.control


def _check_address(address: str) -> None:
    parts = urlsplit(address)
    is_bare = parts.path in ("", "/") and not parts.query and not parts.fragment
    scheme = parts.scheme.rpartition("+")[2]  # before it, vllm or sglang
    if scheme not in ("http", "https") or not parts.hostname or not is_bare:
        raise ApiError(
            400, f"address: {address!r} must be http://HOST:PORT of a nanoinfer.server", "address"
        )
