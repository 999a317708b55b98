"""Writes small tasks in the Harbor layout into a folder, to train on:

python examples/make_harbor.py my-tasks
nanorl train --env harbor --env-args path=my-tasks tools=bash --warm-start.steps 8 --rl.steps 4
"""

import itertools
import sys
from pathlib import Path

WORDS = ["apple", "cherry", "grape", "lemon", "mango", "melon", "orange", "peach", "pear", "plum"]
JOBS = (  # what the agent reads, how it is done, what the file then holds
    ("Write {a} into {f}.txt.", "echo {a} > {f}.txt", "{a}"),
    ("Write {a} in capitals into {f}.txt.", "echo {a} | tr a-z A-Z > {f}.txt", "{A}"),
    ("Write {a} and {f} into {f}.txt.", "echo {a} {f} > {f}.txt", "{a} {f}"),
)
TEST = '[ "$(cat {f}.txt)" = "{right}" ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n'

for number, (a, f) in enumerate(itertools.permutations(WORDS, 2)):
    ask, solve, right = (text.format(a=a, A=a.upper(), f=f) for text in JOBS[number % len(JOBS)])
    task = Path(sys.argv[1]) / f"{a}-{f}"
    (task / "tests").mkdir(parents=True)
    (task / "solution").mkdir()
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 10.0\n")
    (task / "instruction.md").write_text(ask)
    (task / "solution" / "solve.sh").write_text(solve)
    (task / "tests" / "test.sh").write_text(TEST.format(f=f, right=right))
