"""What the page asks for, as JSON: lists of rollouts, one rollout, a task over time, what changed.

Each function takes runs by their names and answers with plain data; ValueError or KeyError says
what was wrong with the question. A search for text has to turn tokens into text, rollout by
rollout, so it stops after SEARCH_S with what it found and says where to go on.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nanorl.inspection.viewer.documents import Json, RolloutDocument, entry_json, token_part
from nanorl.inspection.viewer.runs import TITLES, ViewedRun
from nanorl.inspection.viewer.stored import Selection
from nanorl.observability.report.summary import EVALUATIONS
from nanorl.observability.store import Entry, RolloutStore
from nanorl.observability.trajectories.base import Trajectory
from nanorl.shown_pictures import SeeingDecode, told

SEARCH_S = 1.5
_SEARCH_PAGE = 100
MOST_GROUP = 64
MOST_ATTEMPTS = 1000
MOST_WORDS = 6_000
"""Of one turn, for a comparison: finding what changed takes longer than in proportion."""


@dataclass(frozen=True, kw_only=True)
class RolloutPlace:
    """The place of a rollout: its run, its phase and its id."""

    run: ViewedRun
    phase: str
    rollout_id: str

    def document(self) -> RolloutDocument:
        """The rollout with all that is known of it. KeyError without it."""
        with self.run.open(self.phase) as store:
            entry = store.entry(self.rollout_id)
            rollout = store.get(self.rollout_id)
            task, stats = store.task(entry.task_id), store.token_stats(self.rollout_id)
        trajectory = self.run.trajectory(rollout, step=entry.step, phase=self.phase)
        return RolloutDocument(entry=entry, trajectory=trajectory, task=task, stats=stats)

    def tokens(self, place: int, start: int, end: int) -> Json:
        """A part of one of its token sequences, with the numbers."""
        with self.run.open(self.phase) as store:
            rollout, stats = store.get(self.rollout_id), store.token_stats(self.rollout_id)
        decode = SeeingDecode(self.run.decode, self.run.pictures)
        return token_part(rollout, stats, decode, place=place, start=start, end=end)


def run_page(run: ViewedRun) -> Json:
    """A run and its phases, as the page shows them."""
    return {
        "name": run.name,
        "folder": str(run.folder),
        "is_evaluation": run.is_evaluation,
        "status": run.status(),
        "version": run.version(),
        "phases": [{"id": phase, "title": _title(phase)} for phase in run.phases()],
        "notes": run.notes,
    }


def facets(run: ViewedRun, phase: str) -> Json:
    """The values by which the rollouts of a phase can be filtered."""
    with run.open(phase) as store:
        rows = [row for row in store.tally() if _is_of(row.step, run, phase)]
    steps = [row.step for row in rows]
    return {
        "num": sum(row.num for row in rows),
        "kinds": sorted({row.kind for row in rows}),
        "steps": [min(steps), max(steps)] if steps and phase not in EVALUATIONS else None,
    }


def list_page(run: ViewedRun, selection: Selection, phase: str, text: str = "") -> Json:
    """A part of a list. With `text`, `next` is where to go on searching, null at the end; `total`
    is then of the rollouts without regard to the text."""
    with run.open(phase) as store:
        if text:
            return _search(run, store, selection, text)
        entries, total = _page(store, selection)
        return {"total": total, "rows": _rows(store, entries), "next": None}


def _page(store: RolloutStore, chosen: Selection) -> tuple[list[Entry], int]:
    return store.page(chosen.where(), order=chosen.order, offset=chosen.offset, limit=chosen.limit)


def _search(run: ViewedRun, store: RolloutStore, selection: Selection, text: str) -> Json:
    """Rollouts in which the text stands, upper and lower case being alike."""
    found: list[Entry] = []
    wanted, until = text.casefold(), time.monotonic() + SEARCH_S
    offset = selection.offset
    while True:
        entries, total = _page(store, replace(selection, offset=offset, limit=_SEARCH_PAGE))
        for entry in entries:
            offset += 1
            if wanted in _all_text(run, store, entry).casefold():
                found.append(entry)
            if len(found) >= selection.limit or time.monotonic() > until:
                break
        is_over = offset >= total or not entries
        if is_over or len(found) >= selection.limit or time.monotonic() > until:
            rows = _rows(store, found)
            return {"total": total, "rows": rows, "next": None if is_over else offset}


def _all_text(run: ViewedRun, store: RolloutStore, entry: Entry) -> str:
    """All that can be searched: ids, what the policy read and said, the expected answer."""
    try:
        rollout = store.get(entry.rollout_id)
    except KeyError:  # the run goes on, and keeps the newest steps alone
        return ""
    task = store.task(entry.task_id)
    said = [told(one, 0, len(one.tokens), run.decode) for one in rollout.sequences]
    answer = "" if task is None else task.answer_text
    return "\n".join([entry.rollout_id, entry.task_id, rollout.error, answer, *said])


def _rows(store: RolloutStore, entries: Sequence[Entry]) -> list[Json]:
    tasks = {task_id: store.task(task_id) for task_id in {entry.task_id for entry in entries}}
    return [entry_json(entry, tasks[entry.task_id]) for entry in entries]


def group_page(run: ViewedRun, phase: str, group_id: str) -> list[Json]:
    """The rollouts of a group, whole, MOST_GROUP at most."""
    selection = run.selection(phase, group_id=group_id, order="oldest", limit=MOST_GROUP)
    with run.open(phase) as store:
        entries, _ = _page(store, selection)
    return [
        RolloutPlace(run=run, phase=phase, rollout_id=entry.rollout_id).document().build()
        for entry in entries
    ]


def attempts(runs: Sequence[ViewedRun], task_id: str) -> list[Json]:
    """Every attempt at a task in the given runs and all their phases, in the order of each run."""
    found = []
    for run in runs:
        for phase in run.phases():
            selection = run.selection(phase, task_id=task_id, order="oldest", limit=MOST_ATTEMPTS)
            with run.open(phase) as store:
                rows = _rows(store, _page(store, selection)[0])
            where = {"run": run.name, "phase": phase, "phase_title": _title(phase)}
            found += [row | where for row in rows]
    return found


def changes(old: RolloutPlace, new: RolloutPlace) -> Json:
    """The differences between two rollouts, turn by turn and word by word.

    The parts of a turn are what the policy said and what it read then; `pieces` are [kind, text]
    with kind same, gone or new.
    """
    sides = [list(_spoken(one.document().trajectory)) for one in (old, new)]
    parts = []
    for number in range(max(map(len, sides))):
        pair = [side[number] if number < len(side) else ("", "") for side in sides]
        role = pair[0][0] or pair[1][0]
        parts.append({"role": role, "pieces": _pieces(pair[0][1], pair[1][1])})
    return {"parts": parts, "is_same": all(one[0] == "same" for p in parts for one in p["pieces"])}


def _spoken(trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    """(role, text) of everything after the prompt, in the order in which it happened."""
    for sequence in [*trajectory.segments, *trajectory.beside]:
        for turn in sequence.turns:
            yield "agent", turn.text
            yield "tool", "\n".join(sequence.text_of(message["content"]) for message in turn.reply)


def _pieces(old: str, new: str) -> list[list[str]]:
    a, b = (re.findall(r"\s+|\w+|[^\w\s]", text)[:MOST_WORDS] for text in (old, new))
    pieces: list[list[str]] = []
    for tag, a_start, a_end, b_start, b_end in difflib.SequenceMatcher(
        None, a, b, autojunk=len(a) > 500
    ).get_opcodes():
        if tag == "equal":
            pieces.append(["same", "".join(a[a_start:a_end])])
            continue
        pieces += [["gone", "".join(a[a_start:a_end])]] if a_end > a_start else []
        pieces += [["new", "".join(b[b_start:b_end])]] if b_end > b_start else []
    if max(len(a), len(b)) == MOST_WORDS:
        pieces.append(["same", "\n… the rest was not compared"])
    return pieces


def _title(phase: str) -> str:
    return TITLES[phase][:1].upper() + TITLES[phase][1:]


def _is_of(step: int, run: ViewedRun, phase: str) -> bool:
    first, last = run.selection(phase).steps or (step, step)
    return first <= step <= last
