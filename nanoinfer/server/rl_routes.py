"""The routes by which other RL stacks drive their engines, under the names of vLLM and SGLang.

    vLLM     /is_paused /wake_up /is_sleeping /abort_requests /reset_prefix_cache /get_world_size
             /v1/load_lora_adapter /v1/unload_lora_adapter
    SGLang   /pause_generation /continue_generation /update_weights_from_disk /abort_request
             /flush_cache /release_memory_occupation /resume_memory_occupation
             /load_lora_adapter /unload_lora_adapter

All but the questions (GET) are routes of control, which the admin's key opens. Their errors say
`"success": false` beside the usual error, for clients that read that.
Weights are never let go: `release_memory_occupation` gives the cache's memory back, and what is
cached comes back with the tag "kv_cache". Routes by which weights come otherwise than from a folder
are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, StrictBool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from nanoinfer.http.api_error import ApiError
from nanoinfer.http.http_io import Handler, in_proportion, parse_object, read_bytes, read_json_body
from nanoinfer.http.http_limits import HttpLimits
from nanoinfer.server.control import Control, PauseMode
from nanoinfer.server.requests import StrictBody

Body = TypeVar("Body", bound=BaseModel)
_Text = Annotated[str, Field(min_length=1)]
_SGLANG = frozenset({"rid", "http_worker_ipc"})  # of every message of its processes

FROM_FOLDERS = "weights come from a folder: POST /update_weights_from_disk with its model_path"
REFUSED = (
    *("/init_weights_update_group", "/destroy_weights_update_group"),
    *("/update_weights_from_distributed", "/update_weights_from_tensor"),
    *("/update_weights_from_ipc", "/init_weight_update_communicator"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"),
    *("/init_broadcaster", "/collective_rpc", "/post_process_weights"),
)
"""Routes of SGLang, vLLM, SkyRL, prime-rl and slime by which weights come from another process."""


class PauseGeneration(StrictBody):
    """As SGLang's: its default ends the requests in flight, which answer what they have."""

    ignored = _SGLANG
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGeneration(StrictBody):
    ignored = _SGLANG | {"torch_empty_cache"}


class UpdateFromDisk(StrictBody):
    ignored = _SGLANG | {
        *("is_async", "torch_empty_cache", "recapture_cuda_graph", "token_step"),
        *("flush_cache", "keep_pause"),
    }
    model_path: _Text
    load_format: Literal["auto", "safetensors"] = "auto"
    abort_all_requests: StrictBool = False
    weight_version: _Text | None = None


class WeightDir(StrictBody):
    """The /update_weights of prime-rl, whose versions have no number."""

    weight_dir: _Text


class AbortRequest(StrictBody):
    ignored = frozenset({"http_worker_ipc", "finished_reason", "aborted_message"})
    rid: str = ""
    abort_all: StrictBool = False


class AbortRequests(StrictBody):
    request_ids: list[_Text] = Field(default_factory=list)


class MemoryTags(StrictBody):
    ignored = _SGLANG | {"level"}
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None

    @property
    def is_of_cache(self) -> bool:
        return not self.tags or "kv_cache" in self.tags


class LoadAdapter(StrictBody):
    ignored = _SGLANG | {"load_inplace", "pinned", "lora_id", "is_3d_lora_weight"}
    lora_name: _Text
    lora_path: _Text


class UnloadAdapter(StrictBody):
    ignored = _SGLANG | {"lora_int_id", "lora_id"}
    lora_name: _Text


class RlRoutes:
    """The routes, over `control`."""

    def __init__(self, control: Control, limits: HttpLimits) -> None:
        self._control, self._limits = control, limits

    def questions(self) -> dict[str, Handler]:
        """The routes for GET, which change nothing."""
        return {
            "/is_paused": self._says("is_paused"),
            "/is_sleeping": self._says("is_asleep", "is_sleeping"),
            "/get_world_size": self._world_size,
        }

    def controls(self) -> Iterator[tuple[str, list[str], Handler]]:
        """Routes of control, each with its methods."""
        post, both = ["POST"], ["GET", "POST"]
        yield "/pause_generation", post, self._pause_generation
        yield "/continue_generation", post, self._continue_generation
        yield "/update_weights_from_disk", post, self._update_from_disk
        yield "/abort_request", post, self._abort_request
        yield "/abort_requests", post, self._abort_requests
        yield "/flush_cache", both, self._flush_cache
        yield "/reset_prefix_cache", post, self._flush_cache
        yield "/release_memory_occupation", both, self._release
        yield "/resume_memory_occupation", both, self._take_back
        yield "/wake_up", post, self._take_back
        yield "/load_lora_adapter", post, self._load_adapter
        yield "/v1/load_lora_adapter", post, self._load_adapter_vllm
        yield "/unload_lora_adapter", post, self._unload_adapter
        yield "/v1/unload_lora_adapter", post, self._unload_adapter_vllm
        for path in REFUSED:
            yield path, post, _refuse

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        """The body of an error."""
        return {"success": False, "message": error.message, **error.to_json()}

    def _says(self, name: str, shown: str | None = None) -> Handler:
        async def handler(_: Request) -> Response:
            return JSONResponse({shown or name: self._control.state()[name]})

        return handler

    async def _world_size(self, _: Request) -> Response:
        return JSONResponse({"world_size": 1})

    async def _pause_generation(self, request: Request) -> Response:
        body = await self._read(request, PauseGeneration)
        mode: PauseMode = "abort" if body.mode == "abort" else "keep"
        await self._control.pause(mode)
        return _done("Generation paused successfully.", **self._control.state())

    async def _continue_generation(self, request: Request) -> Response:
        await self._read(request, ContinueGeneration)
        await self._control.resume()
        return _done("Generation continued successfully.", **self._control.state())

    async def _update_from_disk(self, request: Request) -> Response:
        body = await self._read(request, UpdateFromDisk)
        self._control.folder(body.model_path)  # before any request is ended for it
        if body.abort_all_requests:
            await self._control.client.abort()
        await self._control.load_weights(body.model_path, body.weight_version)
        version = self._control.weight_version
        return _done(f"Weights of version {version} are served.", num_paused_requests=0)

    async def _abort_request(self, request: Request) -> Response:
        body = await self._read(request, AbortRequest)
        if not (body.rid or body.abort_all):
            raise ApiError(400, "rid: give the id of a request, or abort_all: true", "rid")
        num = await self._control.client.abort(None if body.abort_all else body.rid)
        return _done(f"{num} requests ended.", num_aborted=num)

    async def _abort_requests(self, request: Request) -> Response:
        body = await self._read(request, AbortRequests)
        names: list[str | None] = [*body.request_ids] or [None]
        num = sum([await self._control.client.abort(name) for name in names])
        return JSONResponse({"status": "aborted", "aborted": num})

    async def _flush_cache(self, _: Request) -> Response:
        num = await self._control.flush_cache()
        if num:  # 400, at which SGLang's clients try again
            raise ApiError(400, f"{num} requests are in flight; abort them, or let them end")
        return PlainTextResponse("Cache flushed.\n")

    async def _release(self, request: Request) -> Response:
        body = await self._read(request, MemoryTags)
        if body.is_of_cache:
            await self._control.client.sleep()
        released = ["kv_cache"] if body.is_of_cache else []
        return _done("Memory released.", released=released, **self._control.state())

    async def _take_back(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags")
        body = await self._read(request, MemoryTags, {"tags": tags} if tags else {})
        if body.is_of_cache:
            await self._control.client.wake()
        return _done("Memory taken back.", **self._control.state())

    async def _load_adapter(self, request: Request) -> Response:
        body = await self._read(request, LoadAdapter)
        await self._control.load_adapter(body.lora_name, body.lora_path)
        return self._adapters()

    async def _load_adapter_vllm(self, request: Request) -> Response:
        body = await self._read(request, LoadAdapter)
        await self._control.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload_adapter(self, request: Request) -> Response:
        body = await self._read(request, UnloadAdapter)
        await self._control.unload_adapter(body.lora_name)
        return self._adapters()

    async def _unload_adapter_vllm(self, request: Request) -> Response:
        body = await self._read(request, UnloadAdapter)
        await self._control.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _adapters(self) -> Response:
        names = self._control.client.engine.adapters
        loaded = {name: name for name in names}
        return JSONResponse({"success": True, "error_message": "", "loaded_adapters": loaded})

    async def _read(
        self, request: Request, model: type[Body], given: dict[str, Any] | None = None
    ) -> Body:
        """The body, which these clients leave out where it would say nothing."""
        raw = await read_bytes(request, self._limits)
        parsed = await in_proportion(len(raw), lambda: parse_object(raw) if raw.strip() else {})
        return read_json_body(parsed | (given or {}), model)


def _done(message: str, **more: Any) -> Response:
    return JSONResponse({"success": True, "status": "ok", "message": message, **more})


async def _refuse(request: Request) -> Response:
    raise ApiError(501, f"{request.url.path}: is not here; {FROM_FOLDERS}")
