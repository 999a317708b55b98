"""Draws combinations of training options at random: each must train, or refuse by name.

    python scripts/check_options.py --seed 0 --count 20

A combination is one published recipe, a staleness, a number of epochs, and a few more options of
the whole tree of `RunConfig`, with values that suit and now and then one that cannot. It passes
if two steps of the smallest run end well, or if one message without a traceback names one of the
options that were drawn. Prints a table; exit status 1 if any combination fails.

Warm starts are too short here for a right answer, so a penalty on length gives the rewards their
differences. Left out: options that say where (--out, --model, --tasks, --device) or that only make
a run longer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanorl.algorithms.recipes import RECIPES
from nanorl.options.presets import get_preset

SMALLEST = {
    "--preset": "tiny",
    "--dtype": "fp32",
    "--threads": "1",
    "--tool.workers": "1",
    "--warm-start.steps": "2",
    "--warm-start.traces-per-step": "2",
    "--rl.steps": "2",
    "--rl.tasks-per-step": "2",
    "--rl.group-size": "4",
    "--rl.algorithm.overlong-buffer": "200",
    "--evaluation.num-tasks": "1",
    "--evaluation.num-tasks-untrained": "0",
    "--evaluation.num-tasks-no-tool": "0",
}
KEPT = (
    "preset",
    "algorithm",
    "out",
    *("resume", "fork", "log", "log-project"),
    "model",
    "tasks",
    *(
        "task-fields",
        "env",
        *("reward", "rl.algorithm.reward-parts", "rl.curriculum-args"),
        *("agent.loop", "agent.scorer-key-file"),
        "agent.template-args",
        "lora.targets",
        "store",
        *("tool.sandbox", "tool.image", "tool.python"),
        "http.",
    ),  # somebody's own
    "cache-dir",
    "device",
    *("cluster.", "learner.", "rollout.", "monitor."),  # of more than one process
    "evaluation.num-tasks",
)
LENGTHS = ("rl.steps", "warm-start.steps", "warm-start.traces-per-step", "rl.tasks-per-step")
BAD_SHARE = 0.04  # of the numbers


class Option(NamedTuple):
    """One flag and how to draw a value of it."""

    flag: str
    kind: Any
    default: Any


class Outcome(NamedTuple):
    """Says what became of one combination."""

    verdict: Literal["trained", "refused", "BROKEN"]
    detail: str
    seconds: float


def options(record: Any, prefix: str = "") -> Iterator[Option]:
    """Every option of the tree below `record`, a filled-in dataclass."""
    hints = typing.get_type_hints(type(record))
    for field in dataclasses.fields(record):
        name, value = prefix + field.name.replace("_", "-"), getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from options(value, f"{name}.")
        elif not name.startswith((*KEPT, *LENGTHS)):
            yield Option(f"--{name}", hints[field.name], value)


def draw_value(rng: random.Random, kind: Any, default: Any) -> str | None:
    """A value as the command line spells it; None for a kind that cannot be drawn."""
    choices = typing.get_args(kind)
    named = [choice for choice in choices if typing.get_origin(choice) is Literal]
    if named:  # or a function of the user's
        (kind,) = named
        choices = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return str(rng.choice(choices))
    if type(None) in choices:
        if rng.random() < 0.3:
            return "None"
        (kind,) = (choice for choice in choices if choice is not type(None))
        default = kind(0.3) or 30 if default is None else default
    if kind is bool:
        return rng.choice(["True", "False"])
    if kind in (int, float) and rng.random() < BAD_SHARE:
        return rng.choice(["-1", "1000000000", *(["nan", "inf"] if kind is float else [])])
    if kind is int:
        return str(rng.choice([max(default // 2, 1), default, default + 1, default * 2]))
    if kind is float:
        near = [0.0, 0.01, 0.1] if default == 0 else [default * 0.9, default, default * 1.1]
        return f"{rng.choice(near):g}"
    if kind is str:
        return rng.choice(["", "/nowhere"])
    return None


def draw(rng: random.Random, recipe: str, tree: Sequence[Option]) -> dict[str, str]:
    """One combination: flag -> value, without those of `SMALLEST` that stay as they are."""
    drawn = {"--algorithm": recipe}
    if recipe in ("maxrl", "pass_at_k"):
        drawn["--rl.algorithm.overlong-buffer"] = "0"
    drawn["--rl.max-staleness"] = str(rng.choice([0, 0, 1, 2]))
    drawn["--rl.epochs"] = str(rng.choice([1, 1, 2]))
    algorithm = [option for option in tree if option.flag.startswith("--rl.algorithm.")]
    for option in [rng.choice(algorithm), *rng.sample(tree, 3)]:
        value = draw_value(rng, option.kind, option.default)
        if value is not None:
            drawn[option.flag] = value
    return drawn


def spelled(flags: dict[str, str]) -> list[str]:
    """As a command line has them: a truth value is a flag or its negation."""
    found = []
    for flag, value in flags.items():
        if value in ("True", "False"):
            head, _, name = flag.removeprefix("--").rpartition(".")
            negated = name if value == "True" else f"no-{name}"
            found.append(f"--{head}.{negated}" if head else f"--{negated}")
        else:
            found.append(f"{flag}={value}")
    return found


def run_main(arguments: list[str]) -> tuple[int, str]:
    """The training program in this process: exit status and everything it printed."""
    sys.path[:0] = [str(Path(__file__).parent)]
    import train_agent

    output = io.StringIO()
    sys.argv = ["train_agent.py", *arguments]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            status = train_agent.main()
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException:  # a traceback is what this program looks for
            traceback.print_exc()
            status = -1
    return status, output.getvalue()


def judge(drawn: dict[str, str], status: int, output: str, folder: Path) -> tuple[str, str]:
    """The verdict on a run that ended, and its last words."""
    words = " ".join(output.split())
    last = words.rpartition("error: ")[2][-300:]
    if status == 0:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        if [row["step"] for row in rows] != [0, 1]:
            return "BROKEN", f"{len(rows)} steps instead of 2"
        norms = (row.get("grad_norm") for row in rows)  # none where nothing was to be learnt
        shown = ("-" if norm is None else f"{norm:.3g}" for norm in norms)
        return "trained", f"gradient norms {' '.join(shown)}"
    names = {flag.rsplit(".", 1)[-1].removeprefix("--") for flag in {**SMALLEST, **drawn}}
    is_named = any(name in words or name.replace("-", "_") in words for name in names)
    is_clean = status == 2 and "Traceback" not in output
    return ("refused" if is_named and is_clean else "BROKEN"), last


class Checker:
    """Plays combinations one after another in a process of its own, ended where one hangs."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder, self.limit_s = folder, limit_s
        self.count = 0
        self.pool = self._make_pool()

    def _make_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def check(self, drawn: dict[str, str]) -> Outcome:
        self.count += 1
        out = self.folder / str(self.count)
        arguments = spelled({**SMALLEST, **drawn, "--out": str(out)})
        begin = time.monotonic()
        try:
            status, output = self.pool.submit(run_main, arguments).result(self.limit_s)
            verdict, detail = judge(drawn, status, output, out)
        except (TimeoutError, BrokenProcessPool) as error:
            verdict, detail = "BROKEN", f"no answer: {error!r}"
            self.close()
            self.pool = self._make_pool()
        return Outcome(typing.cast(Any, verdict), detail, time.monotonic() - begin)

    def close(self) -> None:
        for process in multiprocessing.active_children():
            process.kill()
        self.pool.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=180.0, help="of one combination")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    tree = list(options(get_preset("tiny").config()))
    recipes = list(RECIPES)
    rng.shuffle(recipes)
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        checker = Checker(Path(folder), args.limit_s)
        try:
            for number in range(args.count):
                recipe = recipes[number % len(recipes)]
                drawn = draw(rng, recipe, tree)
                outcome = checker.check(drawn)
                verdicts.append(outcome.verdict)
                print(f"{outcome.verdict:8} {outcome.seconds:5.1f} s  {recipe}: {outcome.detail}")
                print(f"{'':18}{' '.join(spelled(drawn))}", flush=True)
        finally:
            checker.close()
    counts = {verdict: verdicts.count(verdict) for verdict in ("trained", "refused", "BROKEN")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["BROKEN"] > 0)


if __name__ == "__main__":
    sys.exit(main())
