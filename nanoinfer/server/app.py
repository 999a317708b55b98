"""The HTTP side of an engine: routes, admission, and what each route does.

    /v1/chat/completions  /v1/completions  /v1/models     OpenAI's format
    /v1/responses  /v1/messages                           the APIs of agents (dialect_routes.py)
    /generate  /inference/v1/generate                     token ids in, token ids out; as vLLM's,
                                                          SGLang's (sglang_generate.py)
    /tokenize  /detokenize                                text_routes.py
    /pause  /update_weights  /resume  /sleep  /wake       for the owner of the weights, with a key;
                                                          by other stacks' names (rl_routes.py)
    /abort  /drain                                        ends requests, which answer what they have
    /heartbeat                                            answers between two steps of the engine
    /health  /metrics                                     and what about_routes.py lists
    /  /about                                             a page to chat on, its facts (page.py)

A request is validated before the first byte of its answer, so a bad one is a 4xx and touches no
other. Each completion is an `AsyncEngine.stream` or `generate`; when the client hangs up or time
is over its task is cancelled, which aborts it in the engine.
Left out: several models, users and quotas, TLS (put a proxy in front).
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast, get_args

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.chat.form import ChatForms
from nanoinfer.chat.prompts import ChatPrompt, chat_prompt
from nanoinfer.http.api_error import (
    ApiError,
    ClientDisconnectedError,
    application,
    failure,
    known_error,
    user_errors,
)
from nanoinfer.http.api_key import read_key
from nanoinfer.http.http_io import (
    SHOWN_BYTES,
    Handler,
    in_proportion,
    parse_object,
    read_body,
    read_bytes,
    read_json_body,
    read_object,
)
from nanoinfer.http.listening import require_key
from nanoinfer.http.scrape import scraped
from nanoinfer.llm import LLM
from nanoinfer.options.streams import StreamChunk
from nanoinfer.params import SamplingParams
from nanoinfer.server.about_routes import AboutRoutes
from nanoinfer.server.access import Access
from nanoinfer.server.completions import CompletionJob, Completions
from nanoinfer.server.config import CompletionLimits, ServerConfig
from nanoinfer.server.control import Control, PauseMode
from nanoinfer.server.dialect_routes import DialectRoutes
from nanoinfer.server.page import PageAbout, about_response, page_response
from nanoinfer.server.prometheus import HttpMetrics
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
from nanoinfer.server.rl_routes import RlRoutes, WeightDir
from nanoinfer.server.served_model import ServedModel
from nanoinfer.server.sglang_generate import SglangGenerate, SglangGenerator
from nanoinfer.server.template_fields import default_variables
from nanoinfer.server.text_routes import TextRoutes

LOG = logging.getLogger("nanoinfer.http")
_LET_SEE = "nanoinfer.vision.served_pictures:let_see"  # here: few models see
_READER = "nanoinfer.vision.picture_reader:PictureReader"
OPEN_ROUTES = frozenset({"/", "/health"})  # a browser that opens the page has no key yet


def make_app(config: ServerConfig) -> HttpApp:
    """Load the model and put routes around it. `ValueError` if it would listen to a network without
    asking for a key, or run more threads than the cores could serve."""
    cores = os.cpu_count() or 1
    if config.threads is not None and not 1 <= config.threads <= 4 * cores:
        raise ValueError(
            f"threads={config.threads}: must be 1 to {4 * cores}, 4 for each of the {cores} cores"
        )
    require_key(config.host, has_key=config.has_key)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    name = config.model_name or config.model.resolve().name
    adapters = parse_adapters(config.adapters, name)
    variables = default_variables(config.default_chat_template_kwargs)
    llm = LLM(
        config.model, config.infer, dtype=config.dtype, device=config.device, lora=config.lora
    )
    for adapter, folder in adapters.items():
        llm.engine.load_adapter(adapter, folder)
    tokenizer = llm.tokenizer
    if hasattr(llm.engine.model, "visual"):
        tokenizer = resolve_name(_LET_SEE)(llm.engine.model, config.model)
    tokenizer.variables.update(variables)
    return HttpApp(
        AsyncEngine(llm.engine),
        tokenizer,
        model_name=name,
        limits=config.limits,
        access=Access(
            read_key(config.api_key_file),
            read_key(config.admin_key_file, flag="--admin-key-file"),
            config.allowed_hosts,
        ),
        weights_root=config.weights_root,
        folder=config.model,
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


class HttpApp:
    """The routes over one engine. Weights are read below `weights_root`, nowhere else. A tokenizer
    with a store of pictures is one of a model that sees."""

    def __init__(
        self,
        client: AsyncEngine,
        tokenizer: ChatTokenizer,
        *,
        model_name: str,
        limits: CompletionLimits,
        access: Access,
        weights_root: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self.client = client
        self.metrics = HttpMetrics(client.metrics)
        store = getattr(tokenizer, "store", None)
        reader = None
        if store is not None:
            reader, limits = resolve_name(_READER)(store), limits.with_pictures()
        hold = getattr(store, "held", nullcontext)
        self._completions = Completions(client, limits, self.metrics, hold)
        self._tokenizer = tokenizer
        self._forms = ChatForms(tokenizer)
        self._bound = PromptBound(tokenizer, client.engine.room(0), most_at_once=2)
        self._model = ServedModel(
            client, tokenizer, model_name, self._bound, folder, reader, limits.max_images
        )
        self._control = Control(self._model, self._completions, weights_root)
        self._sglang = SglangGenerator(self._model, self._completions, self._control)
        self._model_name = model_name
        self._limits = limits
        self._access = access
        self.about = PageAbout()

    def starlette(self) -> Starlette:
        about = AboutRoutes(self._model, self._control)
        rl = RlRoutes(self._control, self._limits)
        text = TextRoutes(self._model, self._limits)
        get = {
            "/": self.page,
            "/about": self.tell_about,
            "/health": self.health,
            "/metrics": self.scrape,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            **about.questions(),
            **rl.questions(),
        }
        post = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.complete,
            "/generate": self.generate,
            "/inference/v1/generate": self.generate_choices,
            "/heartbeat": self.heartbeat,
            **dict.fromkeys(("/tokenize", "/v1/tokenize"), text.tokenize),
            **dict.fromkeys(("/detokenize", "/v1/detokenize"), text.detokenize),
        }
        control = {
            "/abort": self.abort,
            "/drain": self._controlling(self._completions.drain),
            "/pause": self.pause,
            "/resume": self._controlling(self._control.resume),
            "/sleep": self._controlling(self.client.sleep),
            "/wake": self._controlling(self.client.wake),
            "/update_weights": self.update_weights,
        }
        routes = [self._route(path, ["GET"], handler) for path, handler in get.items()]
        routes += [self._route(path, ["POST"], handler) for path, handler in post.items()]
        routes += [
            self._route(path, ["POST"], handler, is_control=True)
            for path, handler in control.items()
        ]
        routes += [
            self._route(path, methods, handler, is_control=True, told=rl.error)
            for path, methods, handler in rl.controls()
        ]
        agents = DialectRoutes(self._model, self._completions, self._limits, self._error)
        routes += [
            self._route(path, ["POST"], handler, told=told)
            for path, handler, told in agents.routes()
        ]
        return application(routes)

    # Around every route

    def _route(
        self,
        path: str,
        methods: list[str],
        handler: Handler,
        *,
        is_control: bool = False,
        told: Callable[[ApiError], dict[str, Any]] = ApiError.to_json,
    ) -> Route:
        """A route that asks for a key; `told` is the body of an error there."""

        async def endpoint(request: Request) -> Response:
            start = time.perf_counter()
            try:
                if path not in OPEN_ROUTES:
                    self._access.check(request, is_control=is_control)
                response = await handler(request)
            except Exception as error:  # the border of the process: logged, and told
                shown = self._error(error)
                response = JSONResponse(told(shown), shown.status, shown.headers)
            self.metrics.responses.labels(path, response.status_code).inc()
            self.metrics.request_s.observe(time.perf_counter() - start)
            return response

        return Route(path, endpoint, methods=methods)

    def _error(self, error: BaseException) -> ApiError:
        """Turn `error` into what the client is told. What is not the client's doing is logged."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ClientDisconnectedError):
            self.metrics.hang_ups.inc()
        return known_error(error) or failure(error, LOG, "the engine")

    async def _read(self, request: Request, model: type[Any]) -> Any:
        return await read_body(request, model, self._limits)

    # Completions

    async def chat(self, request: Request) -> Response:
        raw = await read_bytes(request, self._limits)
        body: ChatCompletion = await self._model.read(
            len(raw), lambda taker: read_json_body(parse_object(raw), ChatCompletion, taker)
        )
        head = self._head("chatcmpl", "chat.completion", body)
        messages = [message.for_template() for message in body.messages]
        tools, variables = body.tool_specs(), body.variables()
        form = self._forms.of(tools)
        limit = body.max_completion_tokens or body.max_tokens
        with user_errors():
            prompt = await self._bound.encoded(
                [messages, tools, variables],
                lambda: chat_prompt(
                    self._tokenizer,
                    form.opening(messages),
                    tools=form.schemas,
                    variables=variables,
                    has_opening=body.has_opening,
                    is_continued=body.is_continued,
                ),
                is_seeing=self._model.pictures is not None,
            )
            ids = body.cut(prompt.ids, self._bound.max_tokens, limit)
            if prompt.images and len(ids) < len(prompt.ids):
                raise ValueError("truncate_prompt_tokens: would cut pictures; leave some out")
            jobs = await self._jobs(body, [ChatPrompt(ids, prompt.images)], limit)
        if body.return_token_ids:
            head["prompt_token_ids"] = ids
        written = ChatFormat(self._tokenizer, body, form, messages, ids)
        return await self._answer(request, body, jobs, head, written)

    async def complete(self, request: Request) -> Response:
        body: Completion = await self._read(request, Completion)
        head = self._head("cmpl", "text_completion", body)
        with user_errors():
            limit = 16 if body.max_tokens is None else body.max_tokens  # 16 as in OpenAI's API
            prompts = [
                ChatPrompt(body.cut(ids, self._bound.max_tokens, limit))
                for ids in await self._prompts(body)
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
        return self._model.adapter(model)

    async def _jobs(
        self, body: Sampling, prompts: list[ChatPrompt], limit: int | None
    ) -> list[CompletionJob]:
        seed = uuid.uuid4().int % 2**63

        adapter = self._adapter(body.model)
        images = prompts[0].images  # several prompts are texts

        def params(room: int) -> SamplingParams:
            made = replace(body.params(limit or room, seed), adapter=adapter, images=images)
            is_scored = isinstance(body, Completion) and body.echo and body.logprobs is not None
            return replace(made, prompt_logps=True) if is_scored else made

        return await self._completions.admit([one.ids for one in prompts], body.n, params)

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
        given = await read_object(request, self._limits)
        if "ids" not in given and given.keys() & {"input_ids", "text"}:
            asked = read_json_body(given, SglangGenerate)
            return await self._sglang.answer(request, asked, self._limits.request_timeout_s)
        body = read_json_body(given, Generate)
        name = body.request_id or uuid.uuid4().hex
        with user_errors():
            params = body.sampling()
            await self._model.check_images(params.images)
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
        with user_errors():
            part = body.part()
            params = body.sampling(max(1, self.client.engine.room(len(ids))), seed)
            params = replace(params, adapter=params.adapter or adapter)
            await self._model.check_images(params.images)
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

    def _controlling(self, action: Callable[[], Awaitable[None]]) -> Handler:
        async def handler(_: Request) -> Response:
            await action()
            return JSONResponse(self._control.state())

        return handler

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "keep")
        if mode not in get_args(PauseMode):
            raise ApiError(400, f"mode: {mode!r}: one of {', '.join(get_args(PauseMode))}", "mode")
        await self._control.pause(cast(PauseMode, mode))
        return JSONResponse(self._control.state())

    async def abort(self, request: Request) -> Response:
        body: Abort = await self._read(request, Abort)
        return JSONResponse({"num_aborted": await self.client.abort(body.request_id)})

    async def update_weights(self, request: Request) -> Response:
        given = await read_object(request, self._limits)
        if "weight_dir" in given:
            dir_body = read_json_body(given, WeightDir)
            await self._control.load_weights(dir_body.weight_dir, None)
        else:
            body = read_json_body(given, UpdateWeights)
            await self._control.load_weights(body.path, body.version, body.checksums)
        return JSONResponse(self._control.state())

    # About the server

    async def page(self, _: Request) -> Response:
        return page_response()

    async def tell_about(self, _: Request) -> Response:
        return about_response(self.about, self._model_name)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"} | self._control.state())

    async def heartbeat(self, _: Request) -> Response:
        return JSONResponse(await self.client.beat())

    async def scrape(self, request: Request) -> Response:
        return scraped(request, self.metrics.registry)

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
