"""Pipeline schedules as plain lists, and one simulator that runs them on a clock.

A schedule says, rank by rank, in which order a pipeline computes; nothing else. The training
runner (`pipeline.py`), the simulator below, the estimator and the picture (`scripts/
plot_schedule.py`) all read the same lists, so what is drawn is what runs.

    F   forward of one micro-batch through one chunk of layers
    B   its whole backward
    I   backward for the input only: what the previous stage waits for
    W   backward for the weights: nobody waits for it, so it fills bubbles (zero bubble)

Rank r of p holds chunks 0..v-1; chunk c of rank r is stage c*p + r of the v*p stages of the model.

    gpipe          all forwards, then all backwards             bubble (p-1)/(m+p-1), m live
    1f1b           backward as soon as possible                 same bubble, at most p live
    interleaved    1f1b over v smaller chunks a rank            bubble (p-1)/(vm+p-1)
    zb_h1          1f1b with backward split into I and W        a third of the bubble, p live

Sources: GPipe arXiv 1811.06965; 1F1B and interleaved arXiv 2104.04473; ZB-H1 arXiv 2401.10241.
Left out: ZB-H2 and ZB-V (twice the memory, or a V-shaped placement), DualPipe (two copies of the
weights). Adding one is adding a function that returns lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Action:
    """One piece of work of one rank."""

    kind: Kind
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """`actions[rank]` in the order of execution.

    1F1B over two ranks and three micro-batches: the first rank runs one forward ahead, the last
    goes backward at once.

    >>> for row in make_schedule("1f1b", num_ranks=2, num_micro=3).actions:
    ...     print(*row)
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2

    With backward split into I and W the second rank keeps one W back, so the first waits less:

    >>> for row in make_schedule("zb_h1", num_ranks=2, num_micro=3).actions:
    ...     print(*row)
    F0 F1 I0 W0 F2 I1 W1 I2 W2
    F0 I0 F1 I1 W0 F2 I2 W1 W2
    """

    name: str
    num_micro: int
    num_chunks: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.num_ranks + rank

    def owner(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) that computes a stage."""
        return stage % self.num_ranks, stage // self.num_ranks


# -- the four schedules --------------------------------------------------------------------------


def gpipe(num_ranks: int, num_micro: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards: the simplest, and every activation is alive at once."""
    _check(num_ranks, num_micro, num_chunks, only_one_chunk="gpipe")
    row = [Action("F", i) for i in range(num_micro)] + [Action("B", i) for i in range(num_micro)]
    return Schedule("gpipe", num_micro, 1, (tuple(row),) * num_ranks)


def one_f_one_b(num_ranks: int, num_micro: int, num_chunks: int = 1) -> Schedule:
    """Rank r runs p-1-r forwards ahead, then one forward and one backward in turn."""
    _check(num_ranks, num_micro, num_chunks, only_one_chunk="1f1b")
    rows = []
    for rank in range(num_ranks):
        forwards = [Action("F", i) for i in range(num_micro)]
        backwards = [Action("B", i) for i in range(num_micro)]
        rows.append(_alternate(forwards, backwards, num_ranks - 1 - rank))
    return Schedule("1f1b", num_micro, 1, tuple(rows))


def interleaved(num_ranks: int, num_micro: int, num_chunks: int = 2) -> Schedule:
    """1F1B over `num_chunks` chunks a rank: micro-batches go in groups of p through one chunk
    after the other, so the pipeline fills in steps of a 1/v-th of the layers. Micro-batches that
    do not fill a group follow at the end, all forwards and then all backwards."""
    _check(num_ranks, num_micro, num_chunks)
    whole = num_micro - num_micro % num_ranks
    last = num_chunks - 1
    rows = []
    for rank in range(num_ranks):
        row: list[Action] = []
        for micros, ahead in (
            (range(whole), 2 * (num_ranks - 1 - rank) + last * num_ranks),
            (range(whole, num_micro), num_micro * num_chunks),
        ):
            order = _by_groups(micros, num_ranks, num_chunks)
            forwards = [Action("F", micro, chunk) for micro, chunk in order]
            backwards = [Action("B", micro, last - chunk) for micro, chunk in order]
            row += _alternate(forwards, backwards, ahead)
        rows.append(tuple(row))
    return Schedule("interleaved", num_micro, num_chunks, tuple(rows))


def forward_only(num_ranks: int, num_micro: int, num_chunks: int = 1) -> Schedule:
    """For log-probs: no backward, nothing stays alive."""
    _check(num_ranks, num_micro, num_chunks)
    order = _by_groups(range(num_micro), num_ranks, num_chunks)
    row = tuple(Action("F", micro, chunk) for micro, chunk in order)
    return Schedule("forward_only", num_micro, num_chunks, (row,) * num_ranks)


def _by_groups(micros: range, num_ranks: int, num_chunks: int) -> list[tuple[int, int]]:
    """(micro, chunk): a group of p micro-batches through every chunk, then the next group."""
    return [
        (micro, chunk)
        for first in range(micros.start, micros.stop, num_ranks)
        for chunk in range(num_chunks)
        for micro in range(first, min(first + num_ranks, micros.stop))
    ]


def zb_h1(num_ranks: int, num_micro: int, num_chunks: int = 1) -> Schedule:
    """1F1B whose weight gradients wait: rank r keeps r of them back, so that every rank holds p
    micro-batches, the first rank's number in 1F1B, and the late W fill the end of the pipeline."""
    _check(num_ranks, num_micro, num_chunks, only_one_chunk="zb_h1")
    rows = []
    for rank in range(num_ranks):
        num_ahead = min(num_ranks - rank, num_micro)
        row = [Action("F", i) for i in range(num_ahead)]
        for i in range(num_micro):
            row.append(Action("I", i))
            if i >= rank:
                row.append(Action("W", i - rank))
            if num_ahead + i < num_micro:
                row.append(Action("F", num_ahead + i))
        row += [Action("W", i) for i in range(max(0, num_micro - rank), num_micro)]
        rows.append(tuple(row))
    return Schedule("zb_h1", num_micro, 1, tuple(rows))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
}


def make_schedule(name: str, num_ranks: int, num_micro: int, num_chunks: int = 1) -> Schedule:
    """Make the schedule of that name; `num_chunks` above 1 is for interleaved alone."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: must be one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name](num_ranks, num_micro, num_chunks)


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], num_ahead: int
) -> tuple[Action, ...]:
    """`num_ahead` forwards, then forward and backward in turn, then the other backwards."""
    num_ahead = min(num_ahead, len(forwards))
    row = list(forwards[:num_ahead])
    for i, action in enumerate(forwards[num_ahead:]):
        row += [action, backwards[i]]
    return (*row, *backwards[len(forwards) - num_ahead :])


def _check(
    num_ranks: int, num_micro: int, num_chunks: int, only_one_chunk: str | None = None
) -> None:
    for name, value in (
        ("num_ranks", num_ranks),
        ("num_micro", num_micro),
        ("num_chunks", num_chunks),
    ):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if only_one_chunk is not None and num_chunks != 1:
        raise ValueError(
            f"num_chunks={num_chunks}: {only_one_chunk} has one chunk a rank; use interleaved"
        )


# -- what theory says ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Time of one micro-batch in one whole rank (all its chunks), in any unit."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    send: float = 0.0  # one stage's output to the next rank

    def of(self, kind: Kind, num_chunks: int) -> float:
        whole = {
            "F": self.forward,
            "B": self.input_grad + self.weight_grad,
            "I": self.input_grad,
            "W": self.weight_grad,
        }[kind]
        return whole / num_chunks


def bubble_closed_form(schedule: Schedule, costs: Costs | None = None) -> float:
    """Idle share of the time of a rank, sends free. Holds for zb_h1 of at least as many
    micro-batches as ranks, if W takes no longer than F and I; for interleaved of whole groups."""
    costs = costs if costs is not None else Costs()
    work = costs.forward + costs.input_grad + costs.weight_grad
    waits = schedule.num_ranks - 1
    if schedule.name == "zb_h1":
        idle = waits * (costs.forward + costs.input_grad - costs.weight_grad)
    else:
        idle = waits * work / schedule.num_chunks
    return idle / (idle + schedule.num_micro * work)


# -- the simulator -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """One action on the clock."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The outcome of running a schedule."""

    spans: list[list[Span]]  # by rank
    makespan: float
    bubble: float  # idle share of all ranks' time
    peak_live: list[int]  # by rank, see the function of that name


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run the lists: each rank in order, each action when its input has arrived.

    Raises ValueError for lists that cannot finish (an input that never comes).
    """
    costs = costs if costs is not None else Costs()
    ready: dict[tuple[str, int, int], float] = {}  # (F or B, stage, micro) -> end
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.num_ranks
    total = sum(len(row) for row in schedule.actions)
    done = 0
    while done < total:
        before = done
        for rank, row in enumerate(schedule.actions):
            while len(spans[rank]) < len(row):
                action = row[len(spans[rank])]
                arrival = _arrival(schedule, rank, action, ready, costs.send)
                if arrival is None:
                    break
                begin = max(clock[rank], arrival)
                end = begin + costs.of(action.kind, schedule.num_chunks)
                spans[rank].append(Span(action, begin, end))
                clock[rank] = end
                if action.kind != "W":
                    direction = "F" if action.kind == "F" else "B"
                    ready[direction, schedule.stage(rank, action.chunk), action.micro] = end
                done += 1
        if done == before:
            stuck = [
                f"rank {rank} at {row[len(spans[rank])]}"
                for rank, row in enumerate(schedule.actions)
                if len(spans[rank]) < len(row)
            ]
            raise ValueError(f"schedule {schedule.name!r} never finishes: {', '.join(stuck)}")
    makespan = max(clock)
    busy = sum(span.end - span.begin for row in spans for span in row)
    live = [peak_live(row) for row in schedule.actions]
    return Timeline(spans, makespan, 1 - busy / (makespan * schedule.num_ranks), live)


def _arrival(
    schedule: Schedule,
    rank: int,
    action: Action,
    ready: dict[tuple[str, int, int], float],
    send: float,
) -> float | None:
    """The time at which the input of an action is there; None while nobody has produced it."""
    stage = schedule.stage(rank, action.chunk)
    if action.kind == "F":
        if stage == 0:
            return 0.0
        source = ("F", stage - 1, action.micro)
    elif action.kind == "W":
        source = ("B", stage, action.micro)
    elif stage == schedule.num_stages - 1:
        source = ("F", stage, action.micro)
    else:
        source = ("B", stage + 1, action.micro)
    if source not in ready:
        return None
    is_local = source[1] % schedule.num_ranks == rank
    return ready[source] + (0.0 if is_local else send)


def peak_live(actions: Sequence[Action]) -> int:
    """An activation lives from its F to its B, or to its W where backward is split."""
    live = peak = 0
    for action in actions:
        if action.kind == "F":
            live += 1
            peak = max(peak, live)
        elif action.kind in ("B", "W"):
            live -= 1
    return peak
