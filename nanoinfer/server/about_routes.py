"""What clients of other engines ask of a server: its version, its model, its load.

    /version  /server_info  /get_server_info
    /get_model_info  /model_info  /get_weight_version  /weight_version
    /get_load  /v1/loads  /health_generate

Names are vLLM's and SGLang's, with what of their fields means something here.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanoinfer.http.http_io import Handler
from nanoinfer.server.control import Control
from nanoinfer.server.served_model import ServedModel

PACKAGE = "nanorl-stack"


class AboutRoutes:
    """The routes, over one model."""

    def __init__(self, model: ServedModel, control: Control) -> None:
        self._model, self._control = model, control

    def questions(self) -> dict[str, Handler]:
        """Each path with what answers a GET of it."""
        return {
            "/version": self._version,
            **dict.fromkeys(("/server_info", "/get_server_info"), self._server),
            **dict.fromkeys(("/get_model_info", "/model_info"), self._model_info),
            **dict.fromkeys(("/get_weight_version", "/weight_version"), self._weight_version),
            **dict.fromkeys(("/get_load", "/v1/loads"), self._load),
            "/health_generate": self._beat,
        }

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": package_version()})

    async def _model_info(self, _: Request) -> Response:
        return JSONResponse(self._facts() | {"preferred_sampling_params": None})

    async def _weight_version(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self._control.weight_version})

    async def _server(self, _: Request) -> Response:
        told = {
            "version": package_version(),
            "served_model_name": self._model.name,
            "adapters": self._model.client.engine.adapters,
            "max_model_len": self._model.max_model_len,
            "context_length": self._model.max_model_len,
            "state": self._control.state(),
            "internal_states": [self._model.client.metrics()],
        }
        return JSONResponse(self._facts() | told)

    async def _load(self, _: Request) -> Response:
        metrics = self._model.client.metrics()
        running, waiting = int(metrics["num_running"]), int(metrics["num_waiting"])
        load = {
            "dp_rank": 0,
            "num_reqs": running + waiting,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
        }
        return JSONResponse({"loads": [load], "num_reqs": running + waiting})

    async def _beat(self, _: Request) -> Response:
        return JSONResponse(await self._model.client.beat())

    def _facts(self) -> dict[str, Any]:
        folder = self._model.folder
        path = self._model.name if folder is None else str(folder)
        return {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": True,
            "weight_version": self._control.weight_version,
        }


def package_version() -> str:
    """The version of the installed package; "0" for a bare checkout, which has none."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "0"
