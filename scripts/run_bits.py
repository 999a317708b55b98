"""Hashes of what a short run of the tiny preset computes: the same before and after a change that
says it moves code and no number.

    python scripts/run_bits.py inline --json before.json
    python scripts/run_bits.py local --against before.json
    python scripts/run_bits.py replayed

    inline     both engines in one process: the trained weights, every row of metrics and rollouts
    local      the same run with a process for each role; its hashes are those of inline
    replayed   an asynchronous run, which no second one equals: `nanorl replay` has to find every
               rollout and every version of the weights again

The bits are of this machine: other processors add in another order. No hash belongs in the tree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUN = (
    *("--preset", "tiny", "--threads", "1", "--save-every", "2"),
    *("--warm-start.steps", "40", "--rl.steps", "4", "--rl.tasks-per-step", "6"),
    *("--evaluation.num-tasks", "8", "--evaluation.num-tasks-untrained", "4"),
    *("--evaluation.num-tasks-no-tool", "4"),
)
REWARD = '''"""Differs between any two answers, so that every group teaches something."""
import zlib


def score(text, task):
    return zlib.crc32(text.encode()) % 8 / 7
'''
MEASURED = ("reward", "loss", "grad_norm", "clip_fraction", "logp_gap_max", "action_tokens")
NOT_OF_THE_RUN = {"id", "stored_at"}  # when and as which row a rollout was stored


def nanorl(verb: str, *arguments: str) -> str:
    """What the command prints. Ends this program where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "nanorl", verb, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"nanorl {verb}: {done.stdout}{done.stderr}")
    return done.stdout


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def bits(run: Path) -> dict[str, Any]:
    """The hashes of a finished run, and the numbers of its steps."""
    weights = (run / "model-trained" / "model.safetensors").read_bytes()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    with sqlite3.connect(f"file:{run / 'rollouts.sqlite'}?mode=ro", uri=True) as store:
        store.row_factory = sqlite3.Row
        rows = [
            {name: row[name] for name in row.keys() if name not in NOT_OF_THE_RUN}  # noqa: SIM118
            for row in store.execute("SELECT * FROM rollouts ORDER BY rollout_id")
        ]
    return {
        "weights": digest(weights),
        "rollouts": digest(repr(rows).encode()),
        "num_rollouts": len(rows),
        "steps": [{name: line.get(name) for name in MEASURED} for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Hash what a short tiny run computes.")
    parser.add_argument("kind", choices=("inline", "local", "replayed"))
    parser.add_argument("--json", type=Path, help="write them there")
    parser.add_argument("--against", type=Path, help="fail where these differ")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, reward = Path(folder) / "run", Path(folder) / "score.py"
        reward.write_text(REWARD)
        arguments = [*RUN, "--reward", str(reward), "--out", str(run)]
        if options.kind == "replayed":
            nanorl("train", *arguments, "--rl.max-staleness", "2")
            print(nanorl("replay", str(run)))
            return
        if options.kind == "local":
            arguments += ["--cluster.backend", "local"]
        nanorl("train", *arguments)
        found = bits(run)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if options.against and json.loads(options.against.read_text()) != found:
        sys.exit(f"not the bits of {options.against}")


if __name__ == "__main__":
    main()
