"""The HTTP side of the training service: routes, keys, and errors that the client knows.

A key says whose a request is; there is none without. What a client does wrong is a 4xx with one
message before any work is done: 400 a bad body, 401 a key, 404 a model, path or route that is not
there, 410 what is over, 422 a number used twice. What can only be found out when a request's turn
has come is the answer of its future, which the client raises as RequestFailedError. A fetch that
finds no answer yet is a 408, as the client expects.
Left out: TLS (put a proxy in front).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nanoengine.parallel.device import worker_thread
from nanoengine.state.tensor_file import CheckpointError
from nanoinfer.http.api_error import ApiError, application, failure, known_error
from nanoinfer.http.http_io import Handler, read_body, read_bytes, read_json_body, read_object
from nanoinfer.http.http_limits import HttpLimits
from nanoinfer.http.listening import require_key
from nanorl.serving.training_service import service_requests as bodies
from nanorl.serving.training_service.base_model import TrainableBase
from nanorl.serving.training_service.checkpoints import TinkerPath, make_root
from nanorl.serving.training_service.keys import ClientKeys
from nanorl.serving.training_service.service import TrainingService, lora_facts
from nanorl.serving.training_service.service_clients import Clients
from nanorl.serving.training_service.service_config import ServiceConfig
from nanorl.serving.training_service.service_messages import read_address, read_forward_backward
from nanorl.serving.training_service.shared_base import SharedBase

LOG = logging.getLogger("nanorl.serving.training_service")
BODY_TIMEOUT_S = 60.0

B = TypeVar("B", bound=BaseModel)


def make_app(config: ServiceConfig) -> ServiceApp:
    """Read the base model's configuration and put routes around the service. `ValueError` for
    options that cannot be."""
    cores = os.cpu_count() or 1
    if config.threads is not None and not 1 <= config.threads <= 4 * cores:
        raise ValueError(f"threads={config.threads}: must be 1 to {4 * cores}")
    require_key(config.host, has_key=config.api_key_file is not None)
    root = make_root(config.checkpoints)
    file = config.api_key_file
    keys = ClientKeys.of_user(root) if file is None else ClientKeys.read(file)
    threads = config.threads or torch.get_num_threads()
    executor = worker_thread("training-service", torch.device("cpu"), threads)
    shared = SharedBase(config, TrainableBase(config), executor)
    return ServiceApp(Clients(keys, shared), shared, config)


class ServiceApp:
    """The routes over the services of all clients."""

    def __init__(self, clients: Clients, shared: SharedBase, config: ServiceConfig) -> None:
        self._clients, self._base, self._config = clients, shared.base, config
        self.limits = HttpLimits(
            max_body_bytes=config.max_body_bytes, body_timeout_s=BODY_TIMEOUT_S
        )

    async def close(self) -> None:
        """End what runs."""
        await self._clients.close()

    def starlette(self) -> Starlette:
        get: dict[str, Handler] = {
            "healthz": self.healthz,
            "get_server_capabilities": self.capabilities,
            "samplers/{name}": self.sampler,
            "checkpoints": self.checkpoints,
            "training_runs/{run}/checkpoints": self.checkpoints,
        }
        post: dict[str, Handler] = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "telemetry": self.telemetry,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{name}/finish": self.finish_session,
            "create_model": self.create_model,
            "get_info": self.info,
            "unload_model": self.unload_model,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "load_weights": self.load_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "weights_info": self.weights_info,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.sample,
            "retrieve_future": self.retrieve_future,
            "cancel_future": self.cancel_future,
        }
        routes = [self._route("GET", path, handler) for path, handler in get.items()]
        routes += [self._route("POST", path, handler) for path, handler in post.items()]
        one = "training_runs/{run}/checkpoints/{kind}/{name}"
        routes.append(self._route("DELETE", one, self.delete_checkpoint))
        return application(routes, hint="; not a verb of this service")

    def _route(self, method: str, path: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                if path != "healthz":
                    key = request.headers.get("x-api-key", "")
                    request.state.service = self._clients.service_of(key)
                return await handler(request)
            except Exception as error:  # the border of the process: logged, and told
                known = known_error(error, {CheckpointError: 404, ValueError: 400})
                return (known or failure(error, LOG, "the service")).response()

        return Route(f"/api/v1/{path}", endpoint, methods=[method])

    async def _read(self, request: Request, model: type[B]) -> B:
        return await read_body(request, model, self.limits)

    async def _submit(
        self,
        request: Request,
        model: type[B],
        verb: Callable[[TrainingService, B], tuple[str, str]],
    ) -> Response:
        """Hand a model's request on. One that is refused takes its number all the same: its client
        goes on with the next, which would wait for this one."""
        value = await read_object(request, self.limits)
        try:
            return _promise(verb(_service(request), read_json_body(value, model)))
        except Exception:  # whatever refused it, its number is taken
            _service(request).pass_over(value.get("model_id"), value.get("seq_id"))
            raise

    # -- about the service ---------------------------------------------------------------------

    async def healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(self, _: Request) -> Response:
        length = self._base.shape.max_position_embeddings
        names = sorted(self._base.names)
        facts = {"max_context_length": length, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [{"model_name": n, **facts} for n in names]})

    async def client_config(self, request: Request) -> Response:
        await self._read(request, bodies.Anything)
        return JSONResponse({"pjwt_auth_enabled": False, "use_pyqwest_transport": False})

    async def dynamic_config(self, request: Request) -> Response:
        await self._read(request, bodies.Anything)
        return JSONResponse({"sample_cancel_enabled": True})

    async def telemetry(self, request: Request) -> Response:
        await self._read(request, bodies.Anything)
        return JSONResponse({"status": "accepted"})

    # -- sessions and models -------------------------------------------------------------------

    async def create_session(self, request: Request) -> Response:
        await self._read(request, bodies.CreateSession)
        self._clients.drop_silent()
        session = _service(request).create_session()
        return JSONResponse({"type": "create_session", "session_id": session})

    async def heartbeat(self, request: Request) -> Response:
        _service(request).touch((await self._read(request, bodies.NamedSession)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        await self._read(request, bodies.Anything)
        _service(request).finish_session(request.path_params["name"])
        return Response(status_code=204)

    async def create_model(self, request: Request) -> Response:
        return _promise(
            _service(request).create_model(await self._read(request, bodies.CreateModel))
        )

    async def info(self, request: Request) -> Response:
        body = await self._read(request, bodies.NamedModel)
        return JSONResponse(_service(request).info(body.model_id))

    async def unload_model(self, request: Request) -> Response:
        body = await self._read(request, bodies.NamedModel)
        _service(request).unload(body.model_id)
        return JSONResponse({"type": "unload_model", "model_id": body.model_id})

    async def forward_backward(self, request: Request) -> Response:
        raw = await _read_raw(request, self.limits)
        try:
            # Decoding megabytes would hold up heartbeats.
            message = await asyncio.to_thread(read_forward_backward, raw)
            return _promise(_service(request).forward_backward(message))
        except Exception:  # whatever refused it, its number is taken
            with contextlib.suppress(ValueError):
                _service(request).pass_over(*read_address(raw))
            raise

    async def optim_step(self, request: Request) -> Response:
        return await self._submit(request, bodies.OptimStep, TrainingService.optim_step)

    # -- weights -------------------------------------------------------------------------------

    async def save_weights(self, request: Request) -> Response:
        return await self._submit(request, bodies.SaveWeights, TrainingService.save_weights)

    async def load_weights(self, request: Request) -> Response:
        return await self._submit(request, bodies.LoadWeights, TrainingService.load_weights)

    async def save_weights_for_sampler(self, request: Request) -> Response:
        save = TrainingService.save_weights_for_sampler
        return await self._submit(request, bodies.SaveWeightsForSampler, save)

    async def weights_info(self, request: Request) -> Response:
        body = await self._read(request, bodies.WeightsInfo)
        _, record = _service(request).store.find(TinkerPath.parse(body.tinker_path))
        return JSONResponse({"base_model": record.base_model, **lora_facts(record)})

    async def checkpoints(self, request: Request) -> Response:
        found = _service(request).store.list(request.path_params.get("run"))
        return JSONResponse({"checkpoints": found})

    async def delete_checkpoint(self, request: Request) -> Response:
        given = request.path_params
        path = TinkerPath.parse(f"tinker://{given['run']}/{given['kind']}/{given['name']}")
        await asyncio.to_thread(_service(request).store.delete, path)
        return Response(status_code=204)

    # -- sampling ------------------------------------------------------------------------------

    async def create_sampling_session(self, request: Request) -> Response:
        body = await self._read(request, bodies.CreateSamplingSession)
        name = _service(request).create_sampling_session(body)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    async def sampler(self, request: Request) -> Response:
        name = request.path_params["name"]
        path = _service(request).sampler(name).path
        facts = {"sampler_id": name, "base_model": self._base.name}
        return JSONResponse(facts if path is None else facts | {"model_path": str(path)})

    async def sample(self, request: Request) -> Response:
        future, ids = _service(request).sample(await self._read(request, bodies.SampleBody))
        return JSONResponse({"request_id": future, "sample_sequence_ids": ids})

    # -- futures -------------------------------------------------------------------------------

    async def retrieve_future(self, request: Request) -> Response:
        body = await self._read(request, bodies.RetrieveFuture)
        answer = await _service(request).futures.fetch(body.request_id, self._config.poll_s)
        if answer is None:
            again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(again, status_code=408)
        return Response(answer.body, media_type=answer.media_type)

    async def cancel_future(self, request: Request) -> Response:
        _service(request).cancel_sample((await self._read(request, bodies.CancelFuture)).request_id)
        return Response(status_code=204)


def _service(request: Request) -> TrainingService:
    """That of the client who asks."""
    found: TrainingService = request.state.service
    return found


def _promise(given: tuple[str, str]) -> Response:
    future, model = given
    return JSONResponse({"request_id": future, "model_id": model})


async def _read_raw(request: Request, limits: HttpLimits) -> bytes:
    if request.headers.get("content-type") != "application/x-protobuf":
        raise ApiError(400, "forward_backward: the body must be application/x-protobuf")
    return await read_bytes(request, limits)
