"""`AsksJudge`: a reward that asks another model, until the reply says what was asked for.

A reply that does not say it is asked for again, with another seed, and is infrastructure in the
end: nothing is 0 because the judge mumbled.
Next: judge_models.py, who answers; judge_costs.py, what it costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from nanorl.envs.rewards.judge_costs import JudgeCosts
from nanorl.envs.rewards.judge_models import (
    AddressJudge,
    FolderJudge,
    Judge,
    JudgeFailed,
    JudgeLimits,
)
from nanorl.types import InfrastructureError

T = TypeVar("T")


class AsksJudge:
    """Owns the model that is asked, or the way to it, and counts what that costs."""

    def __init__(
        self,
        *,
        address: str = "",
        folder: str = "",
        judge: Judge | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of `JudgeLimits` and, of an address, model and api_key_file; of a
        folder, dtype and device. ValueError for what does not fit together."""
        names = JudgeLimits.__dataclass_fields__
        limits = JudgeLimits(**{name: options.pop(name) for name in names if name in options})
        if [bool(address), bool(folder), judge is not None].count(True) != 1:
            raise ValueError("a judge has an address or a folder: give one of the two")
        self.costs = JudgeCosts()
        if address:
            judge = AddressJudge(address, limits=limits, costs=self.costs, **options)
        elif folder:
            judge = FolderJudge(folder, limits, costs=self.costs, **options)
        assert judge is not None, "one of the three was given"
        self._judge, self._limits = judge, limits
        self._gate = asyncio.Semaphore(limits.max_at_once)

    @property
    def judges(self) -> tuple[AsksJudge, ...]:
        """Itself: a reward that is made of others has theirs."""
        return (self,)

    @property
    def folder_judge(self) -> FolderJudge | None:
        """The judge where it is a model in a folder, which a role of its own may hold."""
        return self._judge if isinstance(self._judge, FolderJudge) else None

    def close(self) -> None:
        """End an engine of its own. Closing twice is fine."""
        self._judge.close()

    async def _ask_for(
        self, prompt: str, read: Callable[[str], T | None], *, what: str, lines: str
    ) -> tuple[T, str]:
        """Ask until `read` finds something in a reply; returns it and that reply. Once no
        try is left, InfrastructureError names `what` and the `lines` that were asked for."""
        last = ""
        async with self._gate:
            for attempt in range(self._limits.max_tries):
                try:
                    with self.costs.call():
                        said = await self._judge.reply(prompt, attempt)
                except JudgeFailed as error:
                    if error.is_final:
                        raise
                    last = str(error)
                    continue
                if (found := read(said)) is not None:
                    return found, said
                last = f"no {lines} in its reply: ...{said[-200:]!r}"
        raise InfrastructureError(f"no {what} in {self._limits.max_tries} tries: {last}")
