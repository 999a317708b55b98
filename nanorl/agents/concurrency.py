"""How many rollouts play at a time: as many as their caches have room for.

While a rollout waits for its tool, its blocks of the cache are free, and others may take them; then
its next turn computes again what it had computed. A few rollouts more keep the engine busy during
tools; too many make it forget. What was forgotten is seen in every turn: of the tokens that this
rollout had in the cache, how many the engine found.

    limit = ConcurrencyLimit()
    async with limit.place() as place:        # one rollout, as soon as there is room for it
        generator = place.watch(generator)    # counts what its turns find
        ...

The limit is lowered by a quarter where more than a tenth is lost, and raised by one where nothing
is (AIMD, as in congestion control); where more play than may, some wait before their next turn. It
begins without a bound, so a run whose rollouts fit never notices. A token does not depend on how
many play, so neither does what is learnt.
Left out: which rollout goes first (whoever was started first).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nanoinfer.params import Output, SamplingParams
from nanorl.agents.context import Generator


class ConcurrencyLimit:
    """Lets rollouts begin. One event loop only."""

    loss = 0.1  # of what was cached: more is too much
    window = 16  # turns between two decisions
    smallest = 2  # one that decodes and one whose tool runs

    def __init__(self, most: int = 0) -> None:
        """`most` rollouts at a time; 0: found out by what turns find in the cache."""
        if most < 0:
            raise ValueError(f"concurrency={most}: must be at least 0, which is found out")
        self.most: int | None = most or None  # None: no bound yet
        self.is_adaptive = most == 0
        self._num_playing = 0
        self._num_waited = 0  # in this window; the limit has held somebody back
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._had = self._found = self._num_turns = 0
        self._peak = self._all_had = self._all_found = 0  # since `take_counts`

    def take_counts(self) -> dict[str, float]:
        """Since the last call: the most rollouts at a time, and the share of what their turns had
        in the cache that was gone."""
        lost = 1 - self._all_found / self._all_had if self._all_had else 0.0
        counts = {"playing_max": float(self._peak), "cache_lost": lost}
        self._peak, self._all_had, self._all_found = self._num_playing, 0, 0
        return counts

    @asynccontextmanager
    async def place(self) -> AsyncIterator[RolloutSlot]:
        """Inside, one rollout plays."""
        holder = RolloutSlot(self)
        await holder.enter()
        try:
            yield holder
        finally:
            holder.leave()

    def has_place(self) -> bool:
        return self.most is None or self._num_playing < self.most

    @property
    def is_crowded(self) -> bool:
        """True if more play than may: the limit was lowered after they had begun."""
        return self.most is not None and self._num_playing > self.most

    def count_in(self) -> None:
        self._num_playing += 1
        self._peak = max(self._peak, self._num_playing)

    def count_out(self) -> None:
        self._num_playing -= 1
        self._let_in()

    def wait(self, *, is_first: bool) -> asyncio.Future[None]:
        """A place in the queue; whoever lets it in counts it."""
        self._num_waited += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if is_first else self._waiting.append)(turn)
        return turn

    def _let_in(self) -> None:
        while self._waiting and self.has_place():
            turn = self._waiting.popleft()
            if not turn.done():
                self.count_in()
                turn.set_result(None)

    def note_turn(self, had: int, found: int) -> None:
        """A turn whose rollout had so many tokens of its prompt in the cache found these there."""
        found = min(found, had)
        self._had, self._all_had = self._had + had, self._all_had + had
        self._found, self._all_found = self._found + found, self._all_found + found
        self._num_turns += 1
        if self._num_turns >= self.window:
            self._decide()
            self._had = self._found = self._num_turns = self._num_waited = 0

    def _decide(self) -> None:
        if self._found < (1 - self.loss) * self._had:
            self.most = max(self.smallest, self._num_playing * 3 // 4)
        elif self.most is not None and self._num_waited:
            self.most += 1
            self._let_in()


class RolloutSlot:
    """One rollout's place among those that play."""

    def __init__(self, limit: ConcurrencyLimit) -> None:
        self._limit = limit
        self._is_held = False

    async def enter(self) -> None:
        """Wait for it."""
        if self._limit.has_place():
            self._limit.count_in()
            self._is_held = True
        else:
            await self._wait(is_first=False)

    async def _wait(self, *, is_first: bool) -> None:
        turn = self._limit.wait(is_first=is_first)
        try:
            await turn
            self._is_held = True
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._limit.count_out()
            raise

    def leave(self) -> None:
        if self._is_held:
            self._is_held = False
            self._limit.count_out()

    def watch(self, generator: Generator) -> Generator:
        """The generator of this rollout, whose turns say what they find in the cache."""
        return _Watched(generator, self, self._limit) if self._limit.is_adaptive else generator

    async def make_room(self) -> None:
        """Between two turns: wait, before those who have not begun, while too many play."""
        if self._is_held and self._limit.is_crowded:
            self.leave()
            await self._wait(is_first=True)


class _Watched:
    """A generator that compares what a rollout had in the cache with what its next turn finds."""

    def __init__(self, generator: Generator, place: RolloutSlot, limit: ConcurrencyLimit) -> None:
        self._generator, self._place, self._limit = generator, place, limit
        self._cached: list[int] = []  # what the last turn has left in the cache
        self._version = -1

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        await self._place.make_room()
        output = await self._generator.generate(ids, params)
        version = output.versions[0] if output.versions else self._version
        had = len(self._cached)
        # New weights find nothing; a new context has had nothing.
        if had and version == self._version and ids[:had] == self._cached:
            self._limit.note_turn(had, output.num_cached_tokens)
        self._cached = (ids + output.ids)[:-1]  # the last token was never fed
        self._version = output.versions[-1] if output.versions else version
        return output
