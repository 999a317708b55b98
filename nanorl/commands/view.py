"""`nanorl view RUN`: the stored rollouts of a run as a person reads them, turn by turn.

    nanorl view runs/tiny-seed0 --worst
    nanorl view runs/tiny-seed0 --step 12 --task squares --text Traceback

A run that goes on may be read, too. Left out: numbers of single tokens (report.html has them), and
the rollouts of evaluations, which are not stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import tyro
from rich.text import Text

from nanorl.commands.terminal import labelled, page
from nanorl.report.transcript import verdict
from nanorl.store import Entry, RolloutStore
from nanorl.types import Branch, Rollout, Status

Decode = Callable[[list[int]], str]
MOST_SHOWN = 20
NO_MATCH = "no rollout matches"


def view(
    run: tyro.conf.Positional[Path],
    /,
    *,
    step: int | None = None,
    task: str = "",
    text: str = "",
    best: bool = False,
    worst: bool = False,
    failed: bool = False,
) -> None:
    """Read the stored rollouts of a run, 20 at most, the newest last.

    Args:
        run: The run's folder.
        step: Of that training step alone.
        task: Of tasks whose id holds this.
        text: Whose text, prompt and tools included, matches this regular expression.
        best: Those of the highest reward, the best first.
        worst: Those of the lowest reward, the worst first.
        failed: Those that the infrastructure failed; the others are left out.
    """
    if best and worst:
        raise ValueError("view: --best and --worst are opposites; give one of them")
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(f"--text {text}: is not a regular expression ({error})") from None
    decode = _decoder(run)
    file = run / "rollouts.sqlite"
    if not file.is_file():
        raise ValueError(f"{run}: has no rollouts.sqlite yet: no rollout of it was stored")
    with RolloutStore(file) as store:
        entries = [
            entry
            for entry in store.entries(step=step)
            if task in entry.task_id and (entry.status is Status.FAILED) == failed
        ]
        if best or worst:
            entries.sort(key=lambda entry: entry.reward, reverse=best)
        else:
            entries.reverse()
        chosen = list(islice(_matching(store, entries, pattern, decode), MOST_SHOWN))
    if not (best or worst):
        chosen.reverse()
    shown = [readable(entry, rollout, decode) for entry, rollout in chosen]
    page(Text("\n\n").join(shown) if shown else Text(NO_MATCH))


def readable(entry: Entry, rollout: Rollout, decode: Decode) -> Text:
    """A rollout from its prompt to its end, under a line that says what came of it."""
    num_turns = rollout.num_turns
    head = (
        f"{rollout.rollout_id}  step {entry.step}  reward {rollout.reward:g}  {verdict(rollout)}  "
        f"{num_turns} turn{'s' * (num_turns != 1)}, {rollout.num_tokens} tokens  {entry.task_id}"
    )
    lines = [Text(head, style="bold reverse")]
    own, *branches = rollout.sequences
    for branch in branches:
        if branch.is_history:
            lines += [Text(f"-- {branch.title}", style="bold"), *_said(branch, decode)]
    if any(branch.is_history for branch in branches):
        lines.append(Text("-- after it", style="bold"))
    lines += _said(own, decode)
    for branch in branches:
        if not branch.is_history:
            lines += [Text(f"-- {branch.title}", style="bold"), *_said(branch, decode)]
    return Text("\n").join(lines)


def _said(sequence: Branch, decode: Decode) -> list[Text]:
    """One token sequence, turn by turn."""
    lines: list[Text] = []
    spans = sequence.turn_spans

    def add(role: str, start: int, end: int) -> None:
        said = decode(sequence.tokens[start:end]).strip()
        if said:
            lines.append(labelled(role, said))

    add("task", 0, spans[0].action_start if spans else len(sequence.tokens))
    for turn, span in enumerate(spans):
        add("agent", span.action_start, span.action_end)
        if turn < len(sequence.turn_rewards):
            lines.append(labelled("reward", f"{sequence.turn_rewards[turn]:g} for this turn"))
        add("tool", span.action_end, span.observation_end)
    return lines


def _matching(
    store: RolloutStore, entries: list[Entry], pattern: re.Pattern[str], decode: Decode
) -> Iterator[tuple[Entry, Rollout]]:
    for entry in entries:
        rollout = store.get(entry.rollout_id)
        if any(pattern.search(decode(sequence.tokens)) for sequence in rollout.sequences):
            yield entry, rollout


def _decoder(run: Path) -> Decode:
    """Ids to text without special tokens, with the tokenizer of the run's model."""
    from nanorl.saved_models import read_tokenizer  # here: it imports torch

    tokenizer = read_tokenizer(run)
    return lambda ids: tokenizer.decode(ids, skip_special=True)
