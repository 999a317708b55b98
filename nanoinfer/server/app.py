"""The HTTP side of an engine: routes, admission, and what each route does.

    /v1/chat/completions  /v1/completions  /v1/models     OpenAI's format
    /generate  /inference/v1/generate                     token ids in, token ids out; as vLLM's
    /pause  /update_weights  /resume  /sleep  /wake       for the owner of the weights, with a key
    /abort  /drain                                        ends requests, which answer what they have
    /heartbeat                                            answers between two steps of the engine
    /health  /metrics
    /  /about                                             a page to chat on, its facts (page.py)

A request is validated before the first byte of its answer, so a bad one is a 4xx and touches no
other. Each completion is an `AsyncEngine.stream` or `generate`; when the client hangs up or time
is over its task is cancelled, which aborts it in the engine.
Left out: several models, users and quotas, TLS (put a proxy in front).
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from kernels.checksum import checksum
from nanoengine.model.hf import read_state
from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.chat.form import ChatForms
from nanoinfer.chat.prompts import chat_ids
from nanoinfer.llm import LLM
from nanoinfer.params import SamplingParams
from nanoinfer.server.completions import CompletionJob, Completions
from nanoinfer.server.config import HttpLimits, ServerConfig
from nanoinfer.server.http_io import SHOWN_BYTES, ApiError, HungUpError, in_proportion, read_body
from nanoinfer.server.page import PageAbout, about_response, page_response
from nanoinfer.server.prometheus import CONTENT_TYPE, HttpMetrics
from nanoinfer.server.prompt_bound import PromptBound
from nanoinfer.server.requests import (
    Abort,
    ChatCompletion,
    Completion,
    Generate,
    Sampling,
    TokenGenerate,
    UpdateWeights,
)
from nanoinfer.server.responses import (
    ChatFormat,
    TextFormat,
    prompt_logprobs,
    token_choice,
    usage,
)
from nanoinfer.streams import StreamChunk

LOG = logging.getLogger("nanoinfer.http")
OPEN_ROUTES = frozenset({"/", "/health"})  # a browser that opens the page has no key yet
CONTROL_ROUTES = frozenset(
    {"/abort", "/drain", "/pause", "/resume", "/sleep", "/wake", "/update_weights"}
)
Handler = Callable[[Request], Awaitable[Response]]


def make_app(config: ServerConfig) -> HttpApp:
    """Load the model and put routes around it. `ValueError` if it would listen to a network without
    asking for a key, or run more threads than the cores could serve."""
    cores = os.cpu_count() or 1
    if config.threads is not None and not 1 <= config.threads <= 4 * cores:
        raise ValueError(
            f"threads={config.threads}: must be 1 to {4 * cores}, 4 for each of the {cores} cores"
        )
    require_key(config.host, has_key=config.api_key_file is not None)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    name = config.model_name or config.model.resolve().name
    adapters = parse_adapters(config.adapters, name)
    llm = LLM(
        config.model, config.infer, dtype=config.dtype, device=config.device, lora=config.lora
    )
    for adapter, folder in adapters.items():
        llm.engine.load_adapter(adapter, folder)
    return HttpApp(
        AsyncEngine(llm.engine),
        llm.tokenizer,
        model_name=name,
        limits=config.limits,
        api_key=read_key(config.api_key_file),
        weights_root=config.weights_root,
        allowed_hosts=config.allowed_hosts,
    )


def require_key(host: str, *, has_key: bool) -> None:
    """`ValueError` where a network would be listened to without asking for a key."""
    if not has_key and not is_loopback(host):
        raise ValueError(
            f"--host {host}: is open to the network; give --api-key-file, or listen on 127.0.0.1"
        )


def parse_adapters(given: Iterable[str], model_name: str) -> dict[str, Path]:
    """Folders by the names of `--adapters name=folder`. `ValueError` for one that is none, or whose
    name is taken."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ValueError(f"adapters: {text!r}: must be name=folder")
        if name in found or name == model_name:
            raise ValueError(f"adapters: {text!r}: the name {name!r} is taken; choose another one")
        found[name] = Path(folder).expanduser()
    return found


def read_key(file: Path | None, *, flag: str = "--api-key-file") -> str | None:
    """The key that clients must send: the only line of `file`. `ValueError` if it is not one."""
    if file is None:
        return None
    key = read_key_file(file, flag).strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{flag} {file}: the API key must be one line of ASCII text, not empty")
    return key


def read_key_file(file: Path, flag: str) -> str:
    """What stands in a file of keys. `ValueError` if it cannot be read. One that other users of the
    machine can read is told of: they have the keys as well."""
    file = file.expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        mode = file.stat().st_mode
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{flag} {file}: cannot be read ({error})") from None
    if mode & 0o044:
        LOG.warning("%s %s: other users can read this key; chmod 600 it", flag, file)
    return text


class HttpApp:
    """The routes over one engine. /update_weights reads below `weights_root`, nowhere else."""

    def __init__(
        self,
        client: AsyncEngine,
        tokenizer: ChatTokenizer,
        *,
        model_name: str,
        limits: HttpLimits,
        api_key: str | None = None,
        weights_root: Path | None = None,
        allowed_hosts: tuple[str, ...] = (),
    ) -> None:
        self.client = client
        self.metrics = HttpMetrics()
        self._completions = Completions(client, limits, self.metrics)
        self._tokenizer = tokenizer
        self._forms = ChatForms(tokenizer)
        self._bound = PromptBound(tokenizer, client.engine.room(0), most_at_once=2)
        self._model_name = model_name
        self._limits = limits
        self._api_key = api_key
        self._weights_root = weights_root
        self._allowed_hosts = allowed_hosts
        self.about = PageAbout()

    def starlette(self) -> Starlette:
        get = {
            "/": self.page,
            "/about": self.tell_about,
            "/health": self.health,
            "/metrics": self.scrape,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
        }
        post = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.complete,
            "/generate": self.generate,
            "/inference/v1/generate": self.generate_choices,
            "/abort": self.abort,
            "/drain": self._control(self._completions.drain),
            "/heartbeat": self.heartbeat,
            "/pause": self._control(self.client.pause),
            "/resume": self._control(self._resume),
            "/sleep": self._control(self.client.sleep),
            "/wake": self._control(self.client.wake),
            "/update_weights": self.update_weights,
        }
        routes = [Route(path, self._guarded(path, f), methods=["GET"]) for path, f in get.items()]
        routes += [
            Route(path, self._guarded(path, f), methods=["POST"]) for path, f in post.items()
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})

    # Around every route

    def _guarded(self, path: str, handler: Handler) -> Handler:
        async def endpoint(request: Request) -> Response:
            start = time.perf_counter()
            try:
                if path not in OPEN_ROUTES:
                    self._check_key(request, path in CONTROL_ROUTES)
                response = await handler(request)
            except Exception as error:
                response = self._error(error).response()
            self.metrics.responses[path, response.status_code] += 1
            self.metrics.request_s.observe(time.perf_counter() - start)
            return response

        return endpoint

    def _check_key(self, request: Request, is_control: bool) -> None:
        if self._api_key is None:
            if is_foreign_page(request):  # any web page can send requests to loopback
                raise ApiError(403, "a browser's request; start the server with an API key")
            host = request.url.hostname or ""
            if not is_loopback(host) and host not in self._allowed_hosts:
                # a page's own name that was made to lead here, which no Origin tells
                raise ApiError(403, f"host {host!r} is not this server's; add it to allowed_hosts")
            if is_control:
                raise ApiError(403, "closed; start the server with an API key")
            return
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
            raise ApiError(401, "wrong or missing API key; send Authorization: Bearer KEY")

    def _error(self, error: BaseException) -> ApiError:
        """Turn `error` into what the client is told. What is not the client's doing is logged."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ApiError):
            return error
        if isinstance(error, HungUpError):
            self.metrics.num_hang_ups += 1
            return ApiError(499, "the client hung up")
        LOG.error("a request failed", exc_info=error)
        return ApiError(500, f"the engine failed: {type(error).__name__}: {error}")

    async def _read(self, request: Request, model: type[Any]) -> Any:
        return await read_body(
            request, model, self._limits.max_body_bytes, self._limits.body_timeout_s
        )

    # Completions

    async def chat(self, request: Request) -> Response:
        body: ChatCompletion = await self._read(request, ChatCompletion)
        head = self._head("chatcmpl", "chat.completion", body)
        messages = [message.for_template() for message in body.messages]
        tools, variables = body.tool_specs(), body.variables()
        form = self._forms.of(tools)
        limit = body.max_completion_tokens or body.max_tokens
        with _user_errors():
            ids = await self._bound.encoded(
                [messages, tools, variables],
                lambda: chat_ids(
                    self._tokenizer,
                    form.opening(messages),
                    tools=form.schemas,
                    variables=variables,
                    has_opening=body.has_opening,
                    is_continued=body.is_continued,
                ),
            )
            ids = body.cut(ids, self._bound.max_tokens, limit)
            jobs = await self._jobs(body, [ids], limit)
        if body.return_token_ids:
            head["prompt_token_ids"] = ids
        written = ChatFormat(self._tokenizer, body, form, messages, ids)
        return await self._answer(request, body, jobs, head, written)

    async def complete(self, request: Request) -> Response:
        body: Completion = await self._read(request, Completion)
        head = self._head("cmpl", "text_completion", body)
        with _user_errors():
            limit = 16 if body.max_tokens is None else body.max_tokens  # 16 as in OpenAI's API
            prompts = [
                body.cut(ids, self._bound.max_tokens, limit) for ids in await self._prompts(body)
            ]
            jobs = await self._jobs(body, prompts, max(1, limit))
        return await self._answer(request, body, jobs, head, TextFormat(self._tokenizer, body))

    async def _prompts(self, body: Completion) -> list[list[int]]:
        self._completions.check_count(len(body.prompt) * body.n)
        adds, plain = self._tokenizer.encode_prompt, self._tokenizer.encode
        encode = adds if body.add_special_tokens else plain
        return [
            await self._bound.encoded([one], partial(encode, one)) if isinstance(one, str) else one
            for one in body.prompt
        ]

    def _head(self, prefix: str, kind: str, body: Sampling) -> dict[str, Any]:
        model = self._adapter(body.model) or self._model_name
        name = body.name or f"{prefix}-{uuid.uuid4().hex}"
        created = int(time.time())
        return {"id": name, "object": kind, "created": created, "model": model}

    def _adapter(self, model: str | None) -> str:
        """The adapter that a request's `model` names; empty for the model itself."""
        if model is None or model == self._model_name:
            return ""
        if model in self.client.engine.adapters:
            return model
        served = ", ".join(repr(name) for name in [self._model_name, *self.client.engine.adapters])
        raise ApiError(404, f"model {model!r} is not served; this is {served}", "model")

    async def _jobs(
        self, body: Sampling, prompts: list[list[int]], limit: int | None
    ) -> list[CompletionJob]:
        seed = uuid.uuid4().int % 2**63

        adapter = self._adapter(body.model)

        def params(room: int) -> SamplingParams:
            made = replace(body.params(limit or room, seed), adapter=adapter)
            is_scored = isinstance(body, Completion) and body.echo and body.logprobs is not None
            return replace(made, prompt_logps=True) if is_scored else made

        return await self._completions.admit(prompts, body.n, params)

    async def _answer(
        self,
        request: Request,
        body: Sampling,
        jobs: list[CompletionJob],
        head: dict[str, Any],
        form: ChatFormat | TextFormat,
    ) -> Response:
        num_prompt = sum(len(job.ids) for job in jobs[:: body.n])
        if not body.stream:
            outputs = await self._completions.run(request, jobs, body.priority, head["id"])
            outputs = [form.shown(output) for output in outputs]
            pairs = list(zip(jobs, outputs, strict=True))

            def written() -> Response:
                choices = [form.choice(job.index, job.ids, output) for job, output in pairs]
                counts = usage(num_prompt, outputs, body.n)
                head.update(form.head(jobs[0].ids, outputs[0]))
                return JSONResponse(head | {"choices": choices, "usage": counts})

            num_shown = sum(len(output.ids) for output in outputs) * (1 + (body.num_top or 0))
            if body.prompt_logprobs is not None:
                num_shown += num_prompt * body.n * (1 + body.prompt_logprobs)
            return await in_proportion(num_shown * SHOWN_BYTES, written)
        head["object"] = form.chunk_object
        states = [form.start(job.index) for job in jobs]

        def to_event(job: CompletionJob, chunk: StreamChunk) -> dict[str, Any] | None:
            choice = states[job.index].push(chunk)
            return None if choice is None else head | {"choices": [choice]}

        return self._completions.stream(
            jobs,
            body.priority,
            to_event,
            self._error,
            head["id"],
            first=[head | {"choices": [c]} for state in states if (c := state.first) is not None],
            last=(
                lambda outputs: head | {"choices": [], "usage": usage(num_prompt, outputs, body.n)}
            )
            if body.is_usage_wanted
            else None,
        )

    async def generate(self, request: Request) -> Response:
        body: Generate = await self._read(request, Generate)
        name = body.request_id or uuid.uuid4().hex
        with _user_errors():
            params = body.sampling()
            jobs = await self._completions.admit([body.ids], params.n, lambda _: params)
        if body.stream:
            return self._completions.stream(
                jobs,
                body.priority,
                lambda job, chunk: {"index": job.index, **asdict(chunk)},
                self._error,
                name,
            )
        outputs = await self._completions.run(request, jobs, body.priority, name)
        return JSONResponse({"outputs": [asdict(output) for output in outputs]})

    async def generate_choices(self, request: Request) -> Response:
        body: TokenGenerate = await self._read(request, TokenGenerate)
        adapter = self._adapter(body.model)
        name, seed = body.request_id or uuid.uuid4().hex, uuid.uuid4().int % 2**63
        ids = body.token_ids
        with _user_errors():
            part = body.part()
            params = body.sampling(max(1, self.client.engine.room(len(ids))), seed)
            params = replace(params, adapter=params.adapter or adapter)
            if part is not None and params.n > 1:
                raise ValueError("sampled: is of one completion; set n to 1")
            jobs = await self._completions.admit([ids], params.n, lambda _: params, part)
        outputs = await self._completions.run(request, jobs, body.priority, name)
        pairs = zip(jobs, outputs, strict=True)
        return JSONResponse(
            {
                "request_id": name,
                "choices": [token_choice(job.index, o, body.return_output) for job, o in pairs],
                "prompt_logprobs": prompt_logprobs(ids, outputs[0]),
                "usage": usage(len(ids), outputs, params.n),
            }
        )

    # The owner of the weights

    def _control(self, action: Callable[[], Awaitable[None]]) -> Handler:
        async def handler(_: Request) -> Response:
            await action()
            return JSONResponse(self._state())

        return handler

    async def _resume(self) -> None:
        self._completions.is_drained = False
        await self.client.resume()

    async def abort(self, request: Request) -> Response:
        body: Abort = await self._read(request, Abort)
        return JSONResponse({"num_aborted": await self.client.abort(body.request_id)})

    async def update_weights(self, request: Request) -> Response:
        body: UpdateWeights = await self._read(request, UpdateWeights)
        if self._weights_root is None:
            raise ApiError(403, "this server was started without --weights-root")
        folder = (self._weights_root / body.path).resolve()
        if not folder.is_relative_to(self._weights_root.resolve()):
            raise ApiError(403, f"path: {body.path!r} is not below the server's --weights-root")
        with _user_errors():
            state = verified(read_state(folder), body.checksums)
            await self.client.update_weights(state, body.version)
        return JSONResponse(self._state())

    # About the server

    async def page(self, _: Request) -> Response:
        return page_response()

    async def tell_about(self, _: Request) -> Response:
        return about_response(self.about, self._model_name)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"} | self._state())

    async def heartbeat(self, _: Request) -> Response:
        return JSONResponse(await self.client.beat())

    async def scrape(self, _: Request) -> Response:
        return Response(self.metrics.render(self.client.metrics()), media_type=CONTENT_TYPE)

    async def models(self, _: Request) -> Response:
        names = ["", *self.client.engine.adapters]
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._card(self._adapter(request.path_params["name"])))

    def _card(self, adapter: str) -> dict[str, Any]:
        """The model itself, or it with an adapter."""
        name = adapter or self._model_name
        card = {"id": name, "object": "model", "created": 0, "owned_by": "nanoinfer"}
        if adapter:
            card["parent"] = self._model_name
        return card | {"max_model_len": self.client.engine.room(0)}

    def _state(self) -> dict[str, Any]:
        engine = self.client.engine
        return {
            "version": engine.version,
            "is_paused": engine.is_paused,
            "is_asleep": engine.is_asleep,
            "is_drained": self._completions.is_drained,
        }


def verified(
    state: Iterable[tuple[str, Tensor]], checksums: Mapping[str, int] | None
) -> Iterator[tuple[str, Tensor]]:
    """Hand on all of `state`. `ValueError` for a tensor that is not what its checksum says, or has
    none; without any checksums nothing is verified."""
    for name, tensor in state:
        if checksums is not None and checksums.get(name) != checksum(tensor):
            what = "is not what was written" if name in checksums else "is not among the checksums"
            raise ValueError(f"tensor {name!r} {what}; nothing was loaded")
        yield name, tensor


def is_foreign_page(request: Request) -> bool:
    """True for a request of a web page that another server, or nobody, has sent. A page of a name
    that was made to lead here is not foreign by this rule: its host is refused as such."""
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")


def is_loopback(host: str) -> bool:
    """True for a name or address by which this machine calls itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def _user_errors() -> Iterator[None]:
    """Inside, a `ValueError` is about what the client asked for."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        name = message.split(":")[0].split("=")[0]
        raise ApiError(400, message, name if name.isidentifier() else None) from None


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for that class"
    return ApiError(
        error.status_code, f"{request.method} {request.url.path}: {error.detail}"
    ).response()
