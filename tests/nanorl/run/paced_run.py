"""A run that makes no more steps of RL than it is allowed.

    python paced_run.py FILE [options of train_agent.py]

Whoever disturbs a run at its steps comes late on a busy machine, and a step takes a tenth of a
second: the run waits for it, while the rollouts of the next step are played.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
EVERY_S = 0.01


class Pace:
    """The number of steps that a run may make in all, which it reads from a file."""

    program = Path(__file__)

    def __init__(self, file: Path) -> None:
        self.file = file

    def allow(self, num_steps: int) -> None:
        """From now on so many; the run never finds half a number."""
        draft = self.file.with_suffix(".draft")
        draft.write_text(str(num_steps))
        os.replace(draft, self.file)

    def allows(self, step: int) -> bool:
        return step < int(self.file.read_text())

    def keep(self) -> None:
        """The run of this process makes no more steps than that."""
        from nanorl.run.trainer import Trainer

        make_step = Trainer._step

        @wraps(make_step)
        async def make_step_in_turn(trainer: Trainer, step: int, *args: Any) -> None:
            while not self.allows(step):
                await asyncio.sleep(EVERY_S)
            await make_step(trainer, step, *args)

        Trainer._step = make_step_in_turn  # type: ignore[method-assign]


def main() -> int:
    pace = Pace(Path(sys.argv.pop(1)))
    sys.path.insert(0, str(ROOT / "scripts"))
    import train_agent

    pace.keep()
    return train_agent.main()


if __name__ == "__main__":
    sys.exit(main())
