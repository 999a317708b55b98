"""Trains in the README's environment, its own command made short: fails without a rise in reward.

    python scripts/check_rise.py [OPTION ...]

The options are those of `nanorl train`. What is asked for is far below what such a run gains
(benchmarks/front_page_2026-11-25.json), since the policy finds the way within two or three steps,
and which ones these are depends on the processor's bits. Left out: held-out success, which is
measured by hand.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "rise-check"
COMMAND = "-m nanorl train --env examples/maze.py"
SHORT = "--rl.steps 16 --evaluation.num-tasks 16 --evaluation.num-tasks-untrained 1 --no-keep-start"
NUM_STEPS = 3
LEAST_RISE = 0.1
"""Of the mean reward of the last steps over that of the first ones."""


def rise(metrics: Path) -> tuple[float, float]:
    """The mean reward of the first and of the last steps of a run."""
    rewards = [json.loads(line)["reward"] for line in metrics.read_text().splitlines()]
    return fmean(rewards[:NUM_STEPS]), fmean(rewards[-NUM_STEPS:])


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    words = [*COMMAND.split(), *SHORT.split(), "--out", str(OUT), *sys.argv[1:]]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    first, last = rise(OUT / "metrics.jsonl")
    print(f"reward of the first and the last {NUM_STEPS} steps: {first:.3f}, {last:.3f}")
    if last - first < LEAST_RISE:
        print(f"it did not rise by {LEAST_RISE}: the README's environment no longer learns")
        return 1
    shutil.rmtree(OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
