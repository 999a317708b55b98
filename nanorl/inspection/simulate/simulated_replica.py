"""A simulated replica: the inference engine's own scheduler and block manager, on a virtual clock.

    schedule (real) -> sleep for the modelled time of the step -> commit (real)

It is a `ReplicaClient`, so the real router spreads requests over it. One simulated token is a
quantum of q real ones: a step decodes q tokens of every sequence, a block holds q tokens (16 where
q is less), and a step's time is that of q real steps. With q = 1 it is the engine's own step, token
by token; what larger quanta cost in accuracy is seen by halving them (simulation.py).

Requests and weights that come inside a quantum wait for its end, where a real step ends after
milliseconds. So a request is given credit for that wait: as many tokens fewer as it would have
decoded. What a request really holds (`RequestSize`) travels beside its ids, by its seed.
Left out: what the tokens say, drafts, several requests of one seed.
Next: nanoinfer/scheduler.py, which this runs.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from nanoinfer.block_manager import BlockManager
from nanoinfer.params import Output, SamplingParams
from nanoinfer.scheduler import BatchScheduler, Step
from nanoinfer.sequence import Sequence
from nanorl.inspection.simulate.simulation_config import EngineTimes

REAL_BLOCK = 16
"""Tokens of a block of the real cache (nanoinfer/config.py)."""
INSTANT_S = 1e-7
"""A step begins so long after the first request came: all that come at one moment are in it."""


@dataclass(frozen=True)
class RequestSize:
    """Real tokens of a request: `RequestSize(prompt=200, answer=4000)`."""

    prompt: int
    answer: int


@dataclass
class SharedCores:
    """CPU cores that several engines share; with `num_cores` 0 each has its own device."""

    num_cores: float = 0.0
    num_busy: int = 0

    def slowdown(self) -> float:
        """The factor by which work that starts now takes longer because the cores are shared."""
        return max(1.0, self.num_busy / self.num_cores) if self.num_cores else 1.0


@dataclass
class _Request:
    seq: Sequence
    prompt: int  # real tokens
    num_quanta: int  # of its answer
    answer: asyncio.Future[Output]


@dataclass
class ReplicaRecord:
    """The record of a replica's work: `spans` are (start, end, sequences in the step)."""

    busy_s: float = 0.0
    spans: list[tuple[float, float, int]] = field(default_factory=list)


class SimulatedReplica:
    """One inference engine of modelled speed."""

    def __init__(
        self,
        times: EngineTimes,
        quantum: int,
        sizes: dict[int, RequestSize],
        cores: SharedCores,
    ) -> None:
        """`sizes` has the real size of every request, by its seed."""
        self.times = times
        self.quantum = quantum
        self.record = ReplicaRecord()
        self.version = 0
        block_size = max(1, REAL_BLOCK // quantum)
        num_blocks = max(1, times.cache_tokens // (quantum * block_size))
        self._blocks = BlockManager(num_blocks, block_size)
        self.scheduler = BatchScheduler(self._blocks, times.max_batch_tokens, times.max_num_seqs)
        self._sizes, self._cores = sizes, cores
        self._requests: dict[int, _Request] = {}
        self._gone: list[Sequence] = []  # whose callers were cancelled
        self._next_handle = 0
        self._next_version: int | None = None
        self._driver: asyncio.Task[None] | None = None
        self._step_start_s = self._step_end_s = 0.0
        self._is_open, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_idle.set()

    async def generate(
        self, ids: list[int], params: SamplingParams, name: str, sampled: Output | None
    ) -> Output:
        """As `ReplicaClient`. `params.max_tokens` are the quanta of an answer that never waits."""
        assert sampled is None, "a simulated replica is never drained"
        await self._is_open.wait()
        request = self._add(ids, params)
        try:
            return await request.answer
        except asyncio.CancelledError:
            self._gone.append(request.seq)
            raise

    def _add(self, ids: list[int], params: SamplingParams) -> _Request:
        size, loop = self._sizes[params.seed], asyncio.get_running_loop()
        seq = Sequence(self._next_handle, ids, params)
        self._next_handle += 1
        self.scheduler.add(seq)
        num_quanta = self._num_quanta(size.answer, loop.time())
        request = _Request(seq, size.prompt, num_quanta, loop.create_future())
        self._requests[seq.handle] = request
        self._is_idle.clear()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return request

    def _num_quanta(self, num_tokens: int, now_s: float) -> int:
        """The number of quanta of an answer whose request has come now, less the credit for its
        wait."""
        length_s = self._step_end_s - self._step_start_s
        waits = max(0.0, self._step_end_s - now_s) / length_s if length_s else 0.0
        return max(1, round((num_tokens - waits * (self.quantum - 1)) / self.quantum))

    async def load_weights(self, version: int, *, waits: bool) -> None:
        """From the next step on there are new weights, and what was cached is gone. With `waits`
        requests in flight end before, and new ones wait meanwhile."""
        if waits:
            self._is_open.clear()
            await self._is_idle.wait()
            self._is_open.set()
        self._next_version = version
        if not self._requests:
            self._take_version()

    def _take_version(self) -> None:
        if self._next_version is None:
            return
        self.version, self._next_version = self._next_version, None
        self.scheduler.restart_all()
        self._blocks.flush(self.version)

    async def _drive(self) -> None:
        while self._requests:
            await asyncio.sleep(INSTANT_S)
            self._drop_gone()
            self._take_version()
            step = self.scheduler.schedule()
            if step.seqs:
                self._credit_deferred(step)
                await self._pass_time(step)
                self._finish(step)
            else:
                assert not self._requests, "the scheduler has requests and runs none"
        self._is_idle.set()

    def _credit_deferred(self, step: Step) -> None:
        """A request that waits for another one to compute their prefix waits for one real step; the
        rest of the quantum it would have decoded."""
        if self.quantum == 1 or len(self.scheduler.running) == self.times.max_num_seqs:
            return
        handles = {seq.handle for seq in step.seqs}
        for seq in self.scheduler.waiting:
            if seq.waits_for in handles:
                request = self._requests[seq.handle]
                request.num_quanta = max(1, request.num_quanta - 1)

    async def _pass_time(self, step: Step) -> None:
        self._cores.num_busy += 1
        self._step_start_s = asyncio.get_running_loop().time()
        seconds = self.step_seconds(step) * self._cores.slowdown()
        self._step_end_s = self._step_start_s + seconds
        self.record.busy_s += seconds
        self.record.spans.append((self._step_start_s, self._step_end_s, len(step.seqs)))
        await asyncio.sleep(seconds)
        self._cores.num_busy -= 1

    def step_seconds(self, step: Step) -> float:
        """The time of the real steps that a simulated one stands for.

        A sequence that decodes takes part in q of them, at contexts of n .. n + q - 1 tokens; one
        whose prefill ends has its first token from that and takes part in q - 1. A prefill of one
        token, all else being in the cache, is as good as a decode."""
        times, q = self.times, self.quantum
        num_decodes = num_read = num_prefilled = 0.0
        samples = False
        for seq, num_new in zip(step.seqs, step.num_scheduled_tokens, strict=True):
            context = self._requests[seq.handle].prompt + seq.num_sampled * q
            ends = num_new == seq.num_uncomputed_tokens
            samples = samples or ends
            rounds, first = q, context
            if num_new > 1 or not ends:
                rounds, first = q - 1, context + 1
                num_prefilled += context * num_new / len(seq.ids)
            if ends:
                num_decodes += rounds
                num_read += rounds * (first + (rounds - 1) / 2)
        num_steps = q if samples else math.ceil(num_prefilled / times.max_batch_tokens)
        return (
            num_steps * times.step_s
            + num_decodes * times.seq_s
            + num_read * times.kv_s
            + num_prefilled * times.prefill_s
        )

    def _finish(self, step: Step) -> None:
        self.scheduler.commit(step)
        for seq in [seq for seq in step.seqs if seq.num_uncomputed_tokens == 0]:
            seq.append(_token(seq), 0.0, self.version)
            if seq.num_sampled >= self._requests[seq.handle].num_quanta:
                seq.finish_reason = "length"
                self._take_out(seq)

    def _take_out(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        request = self._requests.pop(seq.handle)
        if not request.answer.done():
            request.answer.set_result(seq.output())

    def _drop_gone(self) -> None:
        for seq in self._gone:
            if self._requests.pop(seq.handle, None) is not None:
                self.scheduler.remove(seq)
        self._gone.clear()


def _token(seq: Sequence) -> int:
    """A token that no other request says, since nobody else has its seed."""
    return (seq.params.seed + seq.num_sampled) >> 1
