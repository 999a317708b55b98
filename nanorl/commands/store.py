"""`nanorl store RUN`: how many rollouts a run has kept, of what; which; and dropping some.

    nanorl store runs/tiny-seed0                                 # what there is
    nanorl store runs/tiny-seed0 --where "turn=2, failed"        # a line for each, the newest last
    nanorl store runs/tiny-seed0 --duplicates
    nanorl store runs/tiny-seed0 --expire-days 30 --expire-mb 500 --vacuum

docs/store.md lists what --where understands, and what goes first when space is short. While a run
goes on, it may be read; dropping waits until it is not writing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nanorl.bounds import COUNT, POSITIVE, check_record
from nanorl.commands.terminal import printable
from nanorl.observability.store import Entry, Filter, RolloutStore, open_for_reading
from nanorl.observability.store.stats import StoreStats
from nanorl.options.store_address import training_store


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The options of `nanorl store`."""

    run: tyro.conf.Positional[Path]
    """The run's folder, or a file of rollouts."""
    where: str = ""
    """List the rollouts of a slice, such as "turn=2, failed"; a line each, the newest last."""
    most: int = 20
    """Lines of a list, at most."""
    duplicates: bool = False
    """List what is there more than once."""
    expire_steps: int | None = None
    """Keep the newest steps, so many, and drop the others."""
    expire_days: float | None = None
    """Drop what was stored more than so many days ago."""
    expire_mb: int | None = None
    """Drop what is worth least until all take up so many MiB."""
    vacuum: bool = False
    """Hand free space back, and remove blobs that no rollout names."""

    def __post_init__(self) -> None:
        check_record(self, "", expire_steps=COUNT, expire_days=POSITIVE, expire_mb=COUNT)

    @property
    def expires(self) -> bool:
        limits = (self.expire_steps, self.expire_days, self.expire_mb)
        return any(limit is not None for limit in limits)


def store(options: Annotated[StoreOptions, tyro.conf.arg(name="")]) -> None:
    """Say what rollouts a run has kept, list some, or drop some."""
    where = Filter.parse(options.where)
    address = find_store(options.run)
    is_changed = options.expires or options.vacuum  # to look, one need not be the owner
    with RolloutStore(address) if is_changed else open_for_reading(address) as opened:
        _drop(opened, options)
        if options.where:
            num = opened.count(where)
            for entry in reversed(
                opened.entries(where=where, limit=options.most, newest_first=True)
            ):
                print(entry_line(entry))
            print(f"{num} rollouts: {where}")
        elif options.duplicates:
            for one in opened.duplicates(options.most):
                print(f"{one.num:>6}x  {one.first}  hash={one.content_hash}")
            print(f"{opened.stats().num_duplicates} rollouts say what an earlier one said")
        else:
            print(stats_text(opened.stats()))


def find_store(run: Path) -> str:
    """The address of a run's rollouts. ValueError if there are none."""
    if run.is_file():
        return str(run)
    from nanorl.run.saved_models import read_run  # here: it imports torch

    return training_store(run, read_run(run).store)


def _drop(opened: RolloutStore, options: StoreOptions) -> None:
    mebibytes = options.expire_mb
    if options.expires:
        num = opened.expire(
            options.expire_steps,
            days=options.expire_days,
            max_bytes=None if mebibytes is None else mebibytes << 20,
        )
        print(f"dropped {num} rollouts")
    if options.vacuum:
        num = opened.vacuum()
        print(f"handed free space back; removed {num} blobs that no rollout named")


def entry_line(entry: Entry) -> str:
    """An entry as a line."""
    failed = f", {entry.num_failed_turns} failed" if entry.num_failed_turns else ""
    return printable(
        f"{entry.rollout_id:<16} step {entry.step:<5} reward {entry.reward:<6g} {entry.status:<17} "
        f"{entry.num_turns} turns{failed}, {entry.num_tokens} tokens  {entry.task_id}"
    )


def stats_text(stats: StoreStats) -> str:
    """A few lines."""
    counts = {"status": stats.by_status, "type": stats.by_kind}
    lines = [
        f"{stats.num_rollouts} rollouts of {stats.num_steps} steps, {stats.num_tokens} tokens; "
        f"{stats.num_tasks} tasks",
        *(
            f"by {name}: {', '.join(f'{value or chr(45)} {num}' for value, num in found.items())}"
            for name, found in counts.items()
            if found
        ),
        f"{stats.num_duplicates} say what an earlier one said (--duplicates)",
        f"{stats.used_bytes / 2**20:.1f} MiB in the database; contents, wherever they lie: "
        f"{stats.content_bytes / 2**20:.1f}",
    ]
    if stats.num_expired:
        lines.append(
            f"{stats.num_expired} more were dropped, {stats.num_expired_successes} of them "
            "successes"
        )
    return "\n".join(lines)
