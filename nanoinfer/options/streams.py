"""Tokens of one request on their way to a reader, in chunks, as the engine samples them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from nanoinfer.async_engine import AsyncEngine
from nanoinfer.options.full_sequence import FullSequence
from nanoinfer.params import Output, SamplingParams
from nanoinfer.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """The tokens since the chunk before. `text` lags behind `ids` where characters are incomplete
    or may become a stop text. `output` is the whole, in the last chunk alone.

    `StreamChunk(ids=[50], logps=[-0.4], versions=[3], text="Par")`, then
    `StreamChunk(ids=[2], logps=[-1.1], versions=[3], output=Output(ids=[50, 2], ...))`."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logps: list[list[tuple[int, float]]] = field(default_factory=list)
    text: str = ""
    output: Output | None = None


async def stream(
    engine: AsyncEngine, ids: Ids[int], params: SamplingParams, priority: int, name: str | None
) -> AsyncGenerator[StreamChunk, None]:
    """`AsyncEngine.stream`."""
    chunks = TokenStream()
    handle = await engine.enter(chunks, ids, params, priority, name)
    try:
        is_last = False
        while not is_last:
            chunk = await chunks.next()
            is_last = chunk.output is not None
            yield chunk
    finally:
        await engine.leave(handle)


class TokenStream:
    """One writer (the driver of the engine), one reader. Answers like a future to the writer."""

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[StreamChunk | BaseException] = asyncio.Queue()
        self._num_ids = 0
        self._num_chars = 0
        self._is_done = False

    async def next(self) -> StreamChunk:
        """The next chunk; raises what ended the stream if that was an error."""
        item = await self._chunks.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def feed(self, seq: Sequence) -> None:
        """Hand on what `seq` has gained."""
        if seq.num_sampled == self._num_ids:
            return
        asked = seq if isinstance(seq, FullSequence) else None
        text = asked.text.settled() if asked is not None and asked.text is not None else ""
        self._chunks.put_nowait(
            self._chunk(
                seq.ids[seq.num_prompt + self._num_ids :],
                seq.logps,
                seq.versions,
                [] if asked is None else asked.top_logps,
                text,
            )
        )

    def set_result(self, output: Output) -> None:
        self._is_done = True
        self._chunks.put_nowait(
            self._chunk(
                output.ids[self._num_ids :],
                output.logps,
                output.versions,
                output.top_logps,
                output.text or "",
                output,
            )
        )

    def set_exception(self, error: BaseException) -> None:
        self._is_done = True
        self._chunks.put_nowait(error)

    def cancel(self) -> None:
        if not self._is_done:
            self.set_exception(asyncio.CancelledError())

    def done(self) -> bool:
        return self._is_done

    def _chunk(
        self,
        ids: list[int],
        logps: list[float],
        versions: list[int],
        top_logps: list[list[tuple[int, float]]],
        text: str,
        output: Output | None = None,
    ) -> StreamChunk:
        first, start = self._num_ids, self._num_chars
        self._num_ids += len(ids)
        self._num_chars = len(text)
        return StreamChunk(
            ids=ids,
            logps=logps[first:],
            versions=versions[first:],
            top_logps=top_logps[first:],
            text=text[start:],
            output=output,
        )
