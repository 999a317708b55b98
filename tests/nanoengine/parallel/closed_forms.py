"""What theory says about schedules, for tests to hold the lists against."""

from __future__ import annotations

from nanoengine.parallel.schedules import Schedule


def peak_live_closed_form(schedule: Schedule, rank: int) -> int:
    """Most activations of one (micro-batch, chunk) that a rank holds at once; interleaved: of
    whole groups."""
    p, m, v = schedule.num_ranks, schedule.num_micro, schedule.num_chunks
    return {
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1),
        "zb_h1": min(m, p),
    }[schedule.name]
