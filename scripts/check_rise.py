"""Trains in the README's environment, its own command made short, and fails without a rise.

    python scripts/check_rise.py

The run is seeded, but its bits depend on the processor, so what is asked for is well below what
such a run was seen to gain on any (benchmarks/front_page_2026-11-25.json).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "rise-check"
COMMAND = "-m nanorl.cli train --env examples/maze.py"
SHORT = "--rl.steps 8 --evaluation.num-tasks 100 --evaluation.num-tasks-untrained 2 --no-keep-start"
LEAST_RISE = 0.15
"""Of held-out success by RL: two standard errors of a hundred tasks each are 0.14."""


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    words = [sys.executable, *COMMAND.split(), *SHORT.split(), "--out", str(OUT)]
    subprocess.run(words, cwd=ROOT, check=True)
    summary = json.loads((OUT / "summary.json").read_text())
    before, after = summary["heldout_success_before"], summary["heldout_success_after"]
    print(f"held-out success by RL: {before:.1%} -> {after:.1%}, in {summary['wall_s']:.0f} s")
    if after - before < LEAST_RISE:
        print(f"that is no rise of {LEAST_RISE:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
