"""Draws sets of features at random; a run with them must keep what every run is promised.

    python scripts/check_promises.py --seed 0 --count 20

Each set is trained in the smallest run, and then:

    gap        rollout and training log-probs are equal, in every row of metrics, unless rollouts
               are of quantised weights
    replay     `nanorl replay` finds every stored rollout again
    resume     the same run, ended by kill -9 at a random moment and resumed, has the same bits
    processes  the same run with a process for each role has the same bits

A set that is refused is shown with its line, and tried again without one of its features. Prints
a line per set with the seconds; exit status 1 if any promise was broken, and then its runs stay.

Left out: options by themselves, which check_options.py draws; layouts over several ranks, which
add in another order (fault_run.py); that an asynchronous run comes out the same twice. Of one
that is killed and resumed, the gap and the replay are asked.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from run_bits import REWARD, ROOT, bits

from nanorl.algorithms.recipes import RECIPES
from nanorl.observability.report.metrics import read_metrics

End = tuple[int, str]
"""Of a command: exit status and output."""
SMALLEST = (
    *("--preset", "tiny", "--threads", "1", "--tool.workers", "1", "--save-every", "1"),
    *("--warm-start.steps", "3", "--warm-start.traces-per-step", "2", "--rl.steps", "3"),
    *("--rl.tasks-per-step", "3", "--rl.group-size", "4", "--rl.temperature", "1.0"),
    *("--evaluation.num-tasks", "2", "--evaluation.num-tasks-untrained", "0"),
    *("--evaluation.num-tasks-no-tool", "0", "--evaluation.num-tasks-hidden", "0"),
    *("--agent.max-turn-tokens", "16", "--agent.max-context-tokens", "704"),
)
LOCAL = ("--cluster.backend", "local")
ADAPTER = "--lora.rank"
"""Who draws it trains in one process."""
EXPIRED = "stored any more"
"""What a replay says whose weights came of rollouts that the run was told to let go."""
ASYNCHRONOUS = ("--rl.max-staleness", "--rl.batch.order")
"""Who draws one of these has a run that no second one equals."""
FEATURES: Mapping[str, Sequence[str]] = {
    "algorithm": tuple(f"--algorithm {name}" for name in RECIPES),
    "staleness": ("--rl.max-staleness 1", "--rl.max-staleness 2 --rl.batch.stale drop"),
    "in flight": ("--engine.in-flight keep", "--engine.in-flight wait"),
    "order": ("--rl.batch.order finish --rl.batch.oversample 1",),
    "epochs": ("--rl.epochs 2", "--rl.minibatches 3", "--rl.epochs 2 --rl.minibatches 2"),
    "sampling": ("--rl.top-p .8", "--rl.min-p .05", "--rl.top-k 8", "--rl.temperature 1.4"),
    "agent": (
        "--agent feedback",
        "--agent compact",
        "--agent sub_agents",
        "--agent single_turn",
        "--agent.max-turns 2",
        "--agent.max-response-tokens 24",
    ),
    "environments": (
        "--env alphabet_sort reverse_text --env-weights 2 1",
        "--env reverse_text",
        "--env wordle",
        "--env examples/maze.py",
        "--env examples/word_game.py",
        "--env alphabet_sort --env-args max_turns=2 max_names=2",
        "--env examples/corridor.py",
        "--env examples/drawers.py",
        "--env examples/duel.py",
    ),
    "curriculum": (
        "--rl.curriculum learnable",
        "--tasks examples/sums.jsonl --rl.curriculum pools",
        "--tasks examples/tasks.jsonl",
    ),
    "replay": ("--rl.replay.share .34",),
    "filters": (
        "--rl.algorithm.dynamic-sampling",
        "--rl.algorithm.mask-truncated",
        "--rl.batch.filtered drop --rl.algorithm.dynamic-sampling",
        "--rl.batch.spoilt replace",
        "--rl.algorithm.overlong-buffer 8",
    ),
    "length": ("--rl.algorithm.length-coef .1",),
    "entropy": (
        "--rl.algorithm.entropy-coef .01",
        "--rl.algorithm.entropy-share .3 --rl.keep-entropies",
        "--rl.algorithm.entropy-share .5",
    ),
    "reference": (
        "--rl.algorithm.kl-coef .01",
        "--algorithm reinforce_pp --rl.algorithm.kl-reward-coef .01",
        "--algorithm opd --rl.algorithm.distill-trust-region .2",
    ),
    "hindsight": (
        "--algorithm sdpo --rl.algorithm.hindsight success",
        "--algorithm sdpo --rl.algorithm.hindsight feedback",
        "--algorithm sdft --rl.algorithm.hindsight-teacher average",
    ),
    "advantage": (
        "--rl.algorithm.advantage gae",
        "--rl.algorithm.advantage rloo",
        "--rl.algorithm.advantage grpo --rl.algorithm.reward-level turn",
    ),
    "correction": (
        "--rl.algorithm.correction tis",
        "--rl.algorithm.correction none --rl.algorithm.old-policy rollout",
        "--rl.algorithm.correction icepop",
        "--algorithm decoupled_ppo",
    ),
    "lora": (
        "--lora.rank 4",
        "--lora.rank 2 --lora.base-dtype int8",
        "--lora.rank 4 --lora.rslora",
    ),
    "precision": (
        "--dtype fp32",
        "--engine.lm-head-fp32",
        "--engine.quantization int8",
        "--engine.quantization fp8",
    ),
    "memory": (
        "--engine.activation-checkpointing",
        "--engine.micro-batch-tokens 96",
        "--no-engine.share-prefix",
        "--engine.max-num-seqs 3",
        "--engine.max-batch-tokens 300",
        "--engine.cache-mb 1",
    ),
    "evaluation": (
        "--evaluation.every 1 --evaluation.k 2 --evaluation.num-tasks-each 2",
        "--evaluation.num-tasks-no-tool 2",
    ),
    "schedule": ("--rl.schedule linear --rl.warmup-steps 1", "--rl.weight-decay .1"),
    "kept": ("--keep-rollout-steps 1", "--keep-checkpoints 1", "--background-saves"),
}


def draw(rng: random.Random, count: int) -> list[str]:
    """`count` features, each in one of its forms."""
    return [rng.choice(FEATURES[name]) for name in rng.sample(sorted(FEATURES), count)]


def nanorl(verb: str, *arguments: str) -> subprocess.Popen[str]:
    """Begins a command in a session of its own, so that all of it can be killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "nanorl", verb, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end_of(process: subprocess.Popen[str], limit_s: float) -> End:
    """Exit status and output; a command that takes longer is killed, and its status is -9."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
    return process.returncode, output


def kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def last_words(output: str) -> str:
    return " ".join(output.split())[-400:]


class Trial:
    """The smallest run with one set of features, and what became of its promises."""

    def __init__(self, folder: Path, words: Sequence[str], rng: random.Random, limit_s: float):
        self.folder, self.words, self.rng, self.limit_s = folder, words, rng, limit_s
        self.seconds = 0.0
        folder.mkdir()
        (folder / "score.py").write_text(REWARD)
        own = () if {"--env", "--tasks"} & set(words) else ("--reward", str(folder / "score.py"))
        self.arguments = (*SMALLEST, *own, *words)

    def verdict(self) -> tuple[str, list[str]]:
        """What became of it, and the lines that say why."""
        try:
            refused = self.refusal()
            found = [] if refused else list(self.broken())
        except AssertionError as error:
            return "BROKEN", [str(error)]
        return ("refused", [refused]) if refused else ("BROKEN" if found else "kept", found)

    def refusal(self) -> str | None:
        """Trains the run. One line where its options were refused; raises where it broke."""
        begin = time.monotonic()
        status, output = self._train("run")
        self.seconds = time.monotonic() - begin
        if status == 0:
            return None
        if status != 2 or "Traceback" in output or "error: " not in output:
            raise AssertionError(f"exit status {status}: {last_words(output)}")
        return last_words(output.rpartition("error: ")[2])

    def broken(self) -> Iterator[str]:
        """The promises that the finished run does not keep, each in a line."""
        yield from self._broken_alone("run")
        status, output = self._resumed()
        if status:
            yield f"resumed {status}: {last_words(output)}"
        elif set(ASYNCHRONOUS) & set(self.words):
            yield from self._broken_alone("resumed")
        else:
            yield from self._differs("resumed")
        if not set((*ASYNCHRONOUS, ADAPTER)) & set(self.words):
            status, output = self._train("processes", *LOCAL)
            if status:
                yield f"processes {status}: {last_words(output)}"
            else:
                yield from self._differs("processes")

    def _broken_alone(self, name: str) -> Iterator[str]:
        """What can be asked of a run by itself: its gap, and whether it replays."""
        rows = read_metrics(self.folder / name / "metrics.jsonl")
        gaps = [row.get("logp_gap_max", 0.0) for row in rows]
        if any(gaps) and "--engine.quantization" not in self.words:
            yield f"gap of {name} {gaps}"
        status, output = end_of(nanorl("replay", str(self.folder / name)), self.limit_s)
        if status and EXPIRED not in output:
            yield f"replay of {name} {status}: {last_words(output)}"

    def _train(self, name: str, *more: str) -> End:
        process = nanorl("train", *self.arguments, *more, "--out", str(self.folder / name))
        return end_of(process, self.limit_s)

    def _resumed(self) -> End:
        out = self.folder / "resumed"
        process = nanorl("train", *self.arguments, "--out", str(out))
        wait_s = self.rng.uniform(0.3, 1.0) * self.seconds
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        kill(process)
        process.communicate()
        if not (out / "config.json").exists():
            shutil.rmtree(out, ignore_errors=True)
            return self._train("resumed")
        return end_of(nanorl("train", "--resume", "--out", str(out)), self.limit_s)

    def _differs(self, name: str) -> Iterator[str]:
        true, found = (bits(self.folder / one) for one in ("run", name))
        wrong = [key for key, value in found.items() if value != true[key]]
        if wrong:
            yield f"{name}: other {', '.join(wrong)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--features", type=int, default=5, help="of one set")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one command")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="promises-"))
    counts = {"kept": 0, "refused": 0, "BROKEN": 0}
    for number in range(args.count):
        features = draw(rng, args.features)
        while features:
            begin = time.monotonic()
            trial = Trial(folder / str(number), " ".join(features).split(), rng, args.limit_s)
            verdict, lines = trial.verdict()
            counts[verdict] += 1
            print(f"{verdict:8} {time.monotonic() - begin:5.1f} s  {' '.join(features)}")
            for line in lines:
                print(f"{'':10}{line}", flush=True)
            if verdict != "BROKEN":
                shutil.rmtree(trial.folder)
            if verdict != "refused":
                break
            features.pop(rng.randrange(len(features)))
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if not counts["BROKEN"]:
        shutil.rmtree(folder)
    else:
        print(f"The runs of broken promises are in {folder}.")
    return int(counts["BROKEN"] > 0)


if __name__ == "__main__":
    sys.exit(main())
