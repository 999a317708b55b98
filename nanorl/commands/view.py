"""`nanorl view RUN [RUN ...]`: the stored rollouts of runs as a person reads them.

    nanorl view runs/tiny-seed0                    # in a browser, with all that is known of them
    nanorl view runs/a runs/b --port 8700          # two runs beside each other
    nanorl view runs/tiny-seed0 --worst            # in the terminal, turn by turn
    nanorl view runs/tiny-seed0 --step 12 --task squares --text Traceback

A run that goes on may be read, too, and so may the folder of an evaluation, in the browser.
nanorl/inspection/viewer is the page; this file is the terminal, which shows rollouts of training
alone and no numbers of single tokens.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.text import Text

from nanoengine.extras import missing
from nanorl.commands.terminal import labelled, page
from nanorl.observability.report.transcript import verdict
from nanorl.observability.store import Entry, RolloutStore, open_for_reading
from nanorl.options.store_address import training_store
from nanorl.shown_pictures import items
from nanorl.types import Branch, Rollout, Status

if TYPE_CHECKING:
    from nanorl.observability.report.chat_decode import ChatDecode

Decode = Callable[[list[int]], str]
MOST_SHOWN = 20
NO_MATCH = "no rollout matches"


@dataclass(frozen=True, kw_only=True)
class TerminalOptions:
    """The rollouts that the terminal shows, 20 at most, the newest last. One of these options means
    the terminal."""

    terminal: bool = False
    """Read in the terminal, without a browser."""
    step: int | None = None
    """Of that training step alone."""
    task: str = ""
    """Of tasks whose id holds this."""
    text: str = ""
    """Whose text, prompt and tools included, matches this regular expression."""
    best: bool = False
    """Those of the highest reward, the best first."""
    worst: bool = False
    """Those of the lowest reward, the worst first."""
    failed: bool = False
    """Those that the infrastructure failed; the others are left out."""

    def check(self) -> None:
        """ValueError for options that do not go together."""
        if self.best and self.worst:
            raise ValueError("view: --best and --worst are opposites; give one of them")
        try:
            re.compile(self.text)
        except re.error as error:
            raise ValueError(f"--text {self.text}: is not a regular expression ({error})") from None

    @property
    def is_asked_for(self) -> bool:
        return any(getattr(self, field.name) != field.default for field in fields(self))


def view(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    /,
    shown: Annotated[
        tyro.conf.OmitArgPrefixes[TerminalOptions], tyro.conf.arg(name="")
    ] = TerminalOptions(),
    *,
    host: str = "127.0.0.1",
    port: int = 0,
) -> None:
    """Read the stored rollouts of runs, in a browser or in the terminal.

    Args:
        runs: The folders of runs, or of evaluations.
        shown: In the terminal, 20 rollouts at most; any of them means the terminal.
        host: Address to listen on; the default is this machine alone.
        port: 0: any free one, printed at the start.
    """
    if not runs:
        raise ValueError("view: name a run's folder, such as runs/tiny-seed0")
    shown.check()
    if shown.is_asked_for:
        _show_in_terminal(runs, shown)
        return
    try:
        # Here: it imports torch and an extra.
        from nanorl.inspection.viewer.viewer_server import serve_viewer
    except ModuleNotFoundError as error:
        if len(runs) > 1:
            raise missing("a browser, for several runs,", error.name, extra="serve") from None
        print(
            f"{missing('a browser', error.name, extra='serve')}\nhere is the terminal's view",
            file=sys.stderr,
        )
        _show_in_terminal(runs, shown)
        return
    from nanorl.inspection.viewer.runs import find_runs  # here: it imports torch

    found = find_runs(runs)

    def say(address: str) -> None:
        print(f"{', '.join(found)}: {address}   (Ctrl-C ends)", flush=True)

    serve_viewer(found, host=host, port=port, say=say)


def _show_in_terminal(runs: tuple[Path, ...], options: TerminalOptions) -> None:
    if len(runs) > 1:
        raise ValueError("view: the terminal shows one run; leave the options away for a browser")
    from nanorl.run.saved_models import read_run  # here: it imports torch

    [run] = runs
    decode = _decoder(run)
    is_run = (run / "config.json").is_file()  # not a folder of nanorl eval
    with open_for_reading(training_store(run, read_run(run).store if is_run else "")) as store:
        entries = [
            entry
            for entry in store.entries(step=options.step)
            if options.task in entry.task_id and (entry.status is Status.FAILED) == options.failed
        ]
        if options.best or options.worst:
            entries.sort(key=lambda entry: entry.reward, reverse=options.best)
        else:
            entries.reverse()
        pattern = re.compile(options.text)
        chosen = list(islice(_matching(store, entries, pattern, decode), MOST_SHOWN))
    if not (options.best or options.worst):
        chosen.reverse()
    shown = [readable(entry, rollout, decode) for entry, rollout in chosen]
    page(Text("\n\n").join(shown) if shown else Text(NO_MATCH))


def readable(entry: Entry, rollout: Rollout, decode: ChatDecode) -> Text:
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


def _said(sequence: Branch, decode: ChatDecode) -> list[Text]:
    """One token sequence, turn by turn."""
    lines: list[Text] = []
    spans = sequence.turn_spans

    def add(role: str, start: int, end: int) -> None:
        said = decode(items(sequence, start, end, decode.pictures)).strip()
        if said:
            lines.append(labelled(role, said))

    first = spans[0].action_start if spans else len(sequence.tokens)
    opening = items(sequence, 0, first, decode.pictures)
    for piece in decode.pieces(opening):
        lines.append(labelled("system" if piece.role == "system" else "task", piece.text))
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


def _decoder(run: Path) -> ChatDecode:
    """Ids to text without the template's marks, with the tokenizer of the run's model."""
    from nanorl.inspection.viewer.runs import find_runs  # here: both import torch
    from nanorl.observability.report.chat_decode import ChatDecode

    [viewed] = find_runs([run]).values()
    return ChatDecode(viewed.tokenizer)
