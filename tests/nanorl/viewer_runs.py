"""Folders of runs for the tests of the viewer, written by the store itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agent_doubles import tiny_tokenizer

from nanorl.observability.report.evaluation import Evaluation
from nanorl.observability.results import PHASES
from nanorl.observability.store import RolloutStore
from nanorl.options.presets import tiny
from nanorl.task import Task
from nanorl.types import Branch, Rollout, Status, TokenStats, TurnSpan

if TYPE_CHECKING:
    from starlette.testclient import TestClient

TOKENIZER = tiny_tokenizer()


def write_run(folder: Path) -> Path:
    """A run's folder with its options and the tokenizer of its model, one token a byte."""
    TOKENIZER.save(folder / "model-trained")
    (folder / "config.json").write_text(json.dumps(tiny().to_json() | {"dtype": "fp32"}))
    return folder


def make_task(question: str, answer: str = "42", kind: str = "sums") -> Task:
    return Task(question, answer=answer, kind=kind, files={"notes.txt": "a file"})


def spans_of(prompt: str, turns: Sequence[tuple[str, str]]) -> Branch:
    """A token sequence of turns: what the policy said, and what it read then."""
    messages = [{"role": "user", "content": prompt}]
    tokens = TOKENIZER.encode_chat(messages, add_generation_prompt=True)
    mask, spans = [0] * len(tokens), []
    for place, (said, read) in enumerate(turns):
        start = len(tokens)
        tokens += encode(f"{said}<|im_end|>")
        end = len(tokens)
        if read or place + 1 < len(turns):
            reply = f"\n<|im_start|>tool\n{read}<|im_end|>\n<|im_start|>assistant\n"
            tokens += encode(reply)
        mask += [1] * (end - start) + [0] * (len(tokens) - end)
        spans.append(TurnSpan(action_start=start, action_end=end, observation_end=len(tokens)))
    return Branch(
        tokens=tokens,
        loss_mask=mask,
        logps=[-0.125 * (1 + place % 40) * each for place, each in enumerate(mask)],
        versions=[5 if each else -1 for each in mask],
        turn_spans=spans,
    )


def encode(text: str) -> list[int]:
    """Each line once, because a megabyte is much for a tokenizer."""
    lines = text.splitlines(keepends=True)
    ids = {line: TOKENIZER.encode(line, allow_special=True) for line in set(lines)}
    return [token for line in lines for token in ids[line]]


def make_rollout(
    task: Task, name: str, turns: Sequence[tuple[str, str]], *, group: str = "", **fields: object
) -> Rollout:
    own = spans_of(task.prompt_text.encode("utf-8", "replace").decode(), turns)
    return Rollout(
        task_id=task.task_id,
        group_id=group or f"group-{name}",
        rollout_id=name,
        tokens=own.tokens,
        loss_mask=own.loss_mask,
        logps=own.logps,
        versions=own.versions,
        turn_spans=own.turn_spans,
        **fields,  # type: ignore[arg-type]
    )


def make_stats(rollout: Rollout, advantage: float) -> TokenStats:
    """An advantage, a gap of 0.25 nats and an entropy at every sampled token."""
    lists = {"advantage": [], "trained_logp": [], "entropy": []}
    for sequence in rollout.sequences:
        values = {
            "advantage": [advantage for _ in sequence.tokens],
            "trained_logp": [logp + 0.25 for logp in sequence.logps],
            "entropy": [0.5 for _ in sequence.tokens],
        }
        for name, one in values.items():
            pairs = zip(one, sequence.loss_mask, strict=True)
            lists[name].append([value if mask else float("nan") for value, mask in pairs])
    return TokenStats(values=lists)


def store_step(
    run: Path,
    rollouts: Sequence[Rollout],
    *,
    step: int,
    tasks: Sequence[Task] = (),
    phase: str = "rl",
    advantages: Sequence[float] = (),
) -> None:
    """Store a step of training, or an evaluation, as a run does."""
    file = "rollouts" if phase == "rl" else "evaluations"
    with RolloutStore(run / f"{file}.sqlite") as store:
        store.add_tasks(tasks)
        number = step if phase == "rl" else PHASES.index(phase)  # type: ignore[arg-type]
        store.add_group(rollouts, step=number)
        pairs = zip(rollouts, advantages, strict=False)
        store.add_token_stats({one.rollout_id: make_stats(one, value) for one, value in pairs})


def small_run(folder: Path, *, last_is_right: bool = True) -> Path:
    """Three steps of two tasks with a group of two, one cut off, one failed; two evaluations."""
    write_run(folder)
    easy, hard = make_task("What is 6 * 7?"), make_task("Which prime?", "97", kind="primes")
    for step in range(3):
        group = [
            make_rollout(
                task,
                f"s{step}-{task.kind}-m{member}",
                [("I compute it.", "a result of the tool"), (f"It is {value}.", "")],
                group=f"s{step}-{task.kind}",
                reward=float(value == task.answer),
                metrics={"reward/format": 0.5, "tool_s": 0.25},
            )
            for task, values in ((easy, ("42", "41")), (hard, ("97" if step == 2 else "91", "90")))
            for member, value in enumerate(values)
        ]
        store_step(
            folder, group, step=step, tasks=[easy, hard], advantages=[0.75, -0.75, 0.5, -0.5]
        )
    cut = make_rollout(easy, "cut", [("so I went on and on", "")], status=Status.TRUNCATED_TURN)
    failed = make_rollout(easy, "broken", [], status=Status.FAILED, error="the sandbox <b>died</b>")
    store_step(folder, [cut, failed], step=2)
    held = make_task("A held-out question?", "7", kind="primes")
    for phase, value in (("before", "6"), ("after", "7" if last_is_right else "8")):
        one = make_rollout(
            held, f"eval-{phase}-0", [(f"It is {value}.", "")], reward=float(value == "7")
        )
        store_step(folder, [one], step=0, tasks=[held], phase=phase)
        result = Evaluation.of([(held, one)], title=folder.name, about={}, seconds=1.0)
        result.write(folder / f"eval-{phase}.json")
    rows = [
        {"step": step, "success": step / 2, "reward": step / 2, "wait_s": 1.0} for step in range(3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


KEY = "the-key-of-a-viewer"


def viewed(*runs: Path) -> TestClient:
    """Somebody who has the key of a viewer of these runs."""
    from starlette.testclient import TestClient  # here: reports have no server

    from nanorl.inspection.viewer.runs import find_runs
    from nanorl.inspection.viewer.viewer_server import ViewerServer

    app = ViewerServer(find_runs(runs), key=KEY, is_local=True).starlette()
    return TestClient(app, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {KEY}"})


@contextmanager
def served(*runs: Path, options: Sequence[str] = ()) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address that `nanorl view` prints, with its key, and its process."""
    command = [sys.executable, "-m", "nanorl", "view", *map(str, runs), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(process.stderr.read())
        yield next(word for word in line.split() if word.startswith("http://")), process
    finally:
        process.kill()
        process.communicate()
