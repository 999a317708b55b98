"""Draws a pipeline schedule as SVG, from the very lists that training executes.

    python scripts/plot_schedule.py zb_h1 --ranks 4 --micro 8 --out zb_h1.svg
    python scripts/plot_schedule.py interleaved --chunks 2 --times 1 1 1 --send 0.1

One row a rank, time to the right. F forward, B backward, I and W its two halves; a darker shade is
a later chunk of the same rank; white is bubble. Without --out the SVG goes to standard output.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanoengine.parallel.schedules import (
    SCHEDULES,
    Costs,
    Schedule,
    Span,
    bubble_closed_form,
    make_schedule,
    simulate,
)
from nanorl.observability.report.svg import box, label, sheet

COLOURS = {"F": (96, 146, 214), "B": (118, 184, 120), "I": (118, 184, 120), "W": (226, 178, 92)}
ROW, UNIT, LEFT, TOP = 30, 30, 64, 44


def draw(schedule: Schedule, costs: Costs) -> str:
    """The picture of one simulated run."""
    timeline = simulate(schedule, costs)
    scale = UNIT / min(costs.of(kind, schedule.num_chunks) or 1.0 for kind in ("F", "I", "W"))
    title = (
        f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_micro} micro-batches: "
        f"bubble {timeline.bubble:.3f} (closed form {bubble_closed_form(schedule, costs):.3f})"
    )
    end, parts = LEFT + timeline.makespan * scale, []
    for rank, spans in enumerate(timeline.spans):
        top = TOP + ROW * rank
        parts.append(label(8, top + 19, f"rank {rank}"))
        parts += [_action(span, top, scale, schedule) for span in spans]
        live = f"{timeline.peak_live[rank]} live at most"
        parts.append(label(end + 10, top + 19, live))
    return sheet(parts, end + 150, TOP + ROW * schedule.num_ranks + 16, title=title)


def _action(span: Span, top: int, scale: float, schedule: Schedule) -> str:
    shade = 1 - 0.35 * span.action.chunk / max(1, schedule.num_chunks - 1)
    fill = "rgb({},{},{})".format(*(int(c * shade) for c in COLOURS[span.action.kind]))
    x, width = LEFT + span.begin * scale, (span.end - span.begin) * scale
    said = f"{span.action.kind}{span.action.micro}"
    return box(x, top, width, ROW - 4, fill=fill, stroke="white") + label(
        x + width / 2, top + 18, said, text_anchor="middle"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("schedule", choices=SCHEDULES)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--chunks", type=int, help="chunks a rank; default 2 for interleaved")
    parser.add_argument(
        "--times", type=float, nargs=3, default=(1, 1, 1), metavar=("F", "I", "W"), help="a rank"
    )
    parser.add_argument("--send", type=float, default=0.0, help="time of one message")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chunks = args.chunks or (2 if args.schedule == "interleaved" else 1)
    try:
        schedule = make_schedule(args.schedule, args.ranks, args.micro, chunks)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    forward, input_grad, weight_grad = args.times
    costs = Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, send=args.send)
    picture = draw(schedule, costs)
    if args.out is None:
        print(picture, end="")
    else:
        args.out.write_text(picture)
        print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
