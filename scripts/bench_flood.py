"""What one episode's flood costs its neighbour at the recording endpoint.

    python scripts/bench_flood.py [--context 2048] [--body-bytes 4000000] [--clients 16] [--json F]

Three processes: the endpoint with SmolLM2's tokenizer and an engine that answers at once, so that
all a call takes is the endpoint's own; clients that send one episode long prompts without a pause;
a neighbour that asks its own episode one short question after the other, first without the flood,
then beside it. Rows: the neighbour's median and longest call, with the unflooded one as the peer.
Left out: a model, whose time would hide the rest.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from argparse import ArgumentParser
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from bench_output import print_rows, write_json

from nanoengine.formats.sources import SMOLLM2, resolve_model
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.dialects import all_dialects
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.endpoint.endpoint_server import RecordingServer
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.limits import Limits

CHAT = "/v1/chat/completions"
NUM_CALLS = 200


class AtOnce:
    """An engine that ends every answer as it begins."""

    def __init__(self, eos: int) -> None:
        self._eos = eos

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        return Output(
            ids=[self._eos], logps=[0.0], versions=[0], finish_reason="stop", num_cached_tokens=0
        )


def serve(pipe: Connection, context: int) -> None:
    """The endpoint's process: tells two episodes' addresses and ends when told anything."""

    async def run() -> None:
        tokenizer = ChatTokenizer.from_folder(resolve_model(SMOLLM2.name))
        engine: Any = AtOnce(min(tokenizer.eos_ids))
        limits = Limits(max_turns=10**6, max_turn_tokens=40, max_context_tokens=context)
        server = RecordingServer(all_dialects(tokenizer), model="m", max_model_len=context)
        one, two = (
            Recording(engine, tokenizer, limits=limits, sampling=SamplingParams(seed=1))
            for _ in range(2)
        )
        async with server.episode(one) as first, server.episode(two) as second:
            pipe.send((first.keyed_url, second.keyed_url))
            await asyncio.to_thread(pipe.recv)
        await server.close()

    asyncio.run(run())


def body(text: str) -> bytes:
    said = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": said}).encode()


def flood(url: str, num_clients: int, num_bytes: int, counts: Connection) -> None:
    """Long prompts without a pause, until it is ended; says that it has begun."""
    content = body("the quick brown fox " * (num_bytes // 20))

    async def one(client: httpx.AsyncClient) -> None:
        while True:
            try:
                await client.post(f"{url}{CHAT}", content=content)
                counts.send(1)
            except httpx.HTTPError:
                pass  # it is refused, or cut off: the next one

    async def run() -> None:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits()) as client:
            await asyncio.gather(*(one(client) for _ in range(num_clients)))

    asyncio.run(run())


def neighbour(url: str) -> list[float]:
    """Seconds of each of its calls."""
    found = []
    with httpx.Client(timeout=120) as client:
        for _ in range(NUM_CALLS):
            start = time.perf_counter()
            answer = client.post(f"{url}{CHAT}", content=body("Say hi."))
            found.append(time.perf_counter() - start)
            assert answer.status_code == 200, answer.text
    return found


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--body-bytes", type=int, default=4_000_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, options.context), daemon=True)
    server.start()
    flooded_url, url = ours.recv()
    neighbour(url)  # warms up
    quiet = neighbour(url)
    heard, told = context.Pipe(duplex=False)
    flooding = context.Process(
        target=flood, args=(flooded_url, options.clients, options.body_bytes, told), daemon=True
    )
    flooding.start()
    heard.recv()  # the first answer: it has begun
    beside = neighbour(url)
    num_answered = 1
    while heard.poll():
        heard.recv()
        num_answered += 1
    flooding.kill()
    ours.send("end")
    server.join()
    rows = [
        {
            "name": f"flood-{options.context}-{options.body_bytes}-{name}",
            "value": 1000 * of(beside),
            "unit": "ms",
            "peer": "the same calls without the flood",
            "peer_value": 1000 * of(quiet),
            "ratio": of(beside) / of(quiet),
            "bound": 500.0,
            "clients": options.clients,
            "flood_answers": num_answered,
        }
        for name, of in (("median", median), ("worst", max))
    ]
    print_rows(rows)
    if options.json is not None:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
