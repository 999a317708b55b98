"""From a validated HTTP request to completions: admission, one task each, and their end.

A request is one or more `CompletionJob`s (prompts times n). They run as tasks of one group: if one
fails or the client hangs up, all are cancelled, and cancelling a task aborts its request in the
engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanoengine.spans import ImageSpan
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.http.api_error import ApiError
from nanoinfer.http.http_io import Emit, EventStream, while_connected
from nanoinfer.options.streams import StreamChunk
from nanoinfer.params import Grammar, Output, SamplingParams
from nanoinfer.server.config import CompletionLimits
from nanoinfer.server.prometheus import HttpMetrics

Event = dict[str, Any]
OnChunk = Callable[["CompletionJob", StreamChunk], Awaitable[None]]


@dataclass(frozen=True)
class CompletionJob:
    """One completion of a request."""

    index: int
    ids: list[int]
    params: SamplingParams
    sampled: Output | None = None  # goes on from there


class Completions:
    """Runs jobs on an engine and counts them."""

    def __init__(
        self,
        client: AsyncEngine,
        limits: CompletionLimits,
        metrics: HttpMetrics,
        hold: Callable[[Sequence[ImageSpan]], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Pictures stay, `hold` sees to that, as long as a completion needs them."""
        self._hold = hold
        self._client = client
        self._limits = limits
        self._metrics = metrics
        self.is_drained = False

    async def drain(self) -> None:
        """Refuse requests until `is_drained` is False again; those under way answer what they
        have."""
        self.is_drained = True
        await self._client.abort()

    def _check_open(self) -> None:
        if self.is_drained:
            raise ApiError(503, "the server is drained; ask another one, or call /resume")

    def check_count(self, count: int) -> None:
        """ApiError for more completions than one request may have."""
        most = self._limits.max_completions_per_request
        if count > most:
            raise ApiError(400, f"n: {count} completions in one request; at most {most}", "n")

    async def admit(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: Callable[[int], SamplingParams],
        sampled: Output | None = None,
    ) -> list[CompletionJob]:
        """The jobs of a request, all valid. `params` is given the room that a prompt leaves."""
        self._check_open()
        count = len(prompts) * n
        self.check_count(count)
        if self._metrics.num_active + count > self._limits.max_completions:
            raise ApiError(429, f"{self._metrics.num_active} completions in flight; try again")
        jobs: list[CompletionJob] = []
        for place, ids in enumerate(prompts):
            each = params(max(1, self._client.engine.room(len(ids))))
            check_grammar_size(each.grammar, self._limits)
            # a thread, since a grammar may take a second to compile
            await asyncio.to_thread(self._client.engine.validate, ids, each, sampled)
            jobs += [
                CompletionJob(len(jobs) + i, ids, member, sampled)
                for i, member in enumerate(each.members(place))
            ]
        return jobs

    async def run(
        self, request: Request, jobs: list[CompletionJob], priority: int, name: str
    ) -> list[Output]:
        """Outputs in the order of the jobs. By `name` all of them can be aborted."""
        work = self._run(jobs, priority, name, None)
        return await while_connected(request.receive, work, self._limits.request_timeout_s)

    async def sampled(
        self,
        jobs: list[CompletionJob],
        priority: int,
        name: str,
        on_chunk: OnChunk | None = None,
    ) -> list[Output]:
        """As `run`, for work that watches the connection itself; chunks go to `on_chunk`."""
        return await self._run(jobs, priority, name, on_chunk)

    def stream(
        self,
        jobs: list[CompletionJob],
        priority: int,
        to_event: Callable[[CompletionJob, StreamChunk], Event | None],
        on_error: Callable[[BaseException], ApiError],
        name: str,
        first: Sequence[Event] = (),
        last: Callable[[list[Output]], Event] | None = None,
    ) -> Response:
        """Events: `first`, then one a chunk (or none) as they come, then `last`."""

        async def work(emit: Emit) -> None:
            for event in first:
                await emit(event)

            async def on_chunk(job: CompletionJob, chunk: StreamChunk) -> None:
                event = to_event(job, chunk)
                if event is not None:
                    await emit(event)

            outputs = await self._run(jobs, priority, name, on_chunk)
            if last is not None:
                await emit(last(outputs))

        return EventStream(work, self._limits.request_timeout_s, on_error)

    async def _run(
        self, jobs: list[CompletionJob], priority: int, name: str, on_chunk: OnChunk | None
    ) -> list[Output]:
        self._metrics.num_active += len(jobs)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(job, priority, name, on_chunk)) for job in jobs
                ]
            return [task.result() for task in tasks]
        finally:
            self._metrics.num_active -= len(jobs)

    async def _one(
        self, job: CompletionJob, priority: int, name: str, on_chunk: OnChunk | None
    ) -> Output:
        self._check_open()  # drained since it was admitted
        with self._hold(job.params.images):
            return await self._held(job, priority, name, on_chunk)

    async def _held(
        self, job: CompletionJob, priority: int, name: str, on_chunk: OnChunk | None
    ) -> Output:
        if on_chunk is None:
            return await self._client.generate(job.ids, job.params, priority, name, job.sampled)
        start, output = time.perf_counter(), None
        is_first = True
        async with aclosing(self._client.stream(job.ids, job.params, priority, name)) as chunks:
            async for chunk in chunks:
                if is_first:
                    self._metrics.first_token_s.observe(time.perf_counter() - start)
                    is_first = False
                await on_chunk(job, chunk)
                output = chunk.output
        assert output is not None, "the last chunk of a stream has the output"
        return output


def check_grammar_size(grammar: Grammar | None, limits: CompletionLimits) -> None:
    """ValueError for a grammar that would take long to compile."""
    if grammar is None:
        return
    size = len(grammar.value) + sum(map(len, grammar.choices))
    if len(grammar.choices) > limits.max_choices or size > limits.max_grammar_chars:
        raise ValueError(
            f"grammar {grammar.kind}: {len(grammar.choices)} choices, {size} characters; at "
            f"most {limits.max_choices} and {limits.max_grammar_chars}"
        )
