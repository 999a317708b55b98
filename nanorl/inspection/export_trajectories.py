"""Which rollouts of which run go where: `export_rollouts`, behind `nanorl export`.

    export_rollouts(ExportOptions(run=Path("runs/tiny-seed0"), to="jsonl", min_reward=1.0))

Rollouts are read one after the other, so a store of any size is exported in the memory of a few.
A run that goes on may be exported, too. The run's environment is asked how tools are called; where
it is not to be found any more, or is not trusted, calls are read as the model's chat template
writes them.
Left out: the folders of `nanorl eval`, which do not hold the options that their rollouts were
played with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import tyro

from nanoengine.extras import missing
from nanorl.bounds import check_number
from nanorl.observability.results import PHASES
from nanorl.observability.store import Entry, Filter, RolloutStore, open_for_reading
from nanorl.observability.trajectories.atif import write_atif
from nanorl.observability.trajectories.base import Trajectory, TrajectoryReader
from nanorl.observability.trajectories.jsonl import write_jsonl
from nanorl.observability.trajectories.run_parsers import agent_info, find_parsers
from nanorl.options.run_config import RunConfig
from nanorl.options.store_address import EVALUATIONS_FILE, training_store
from nanorl.shown_pictures import RunPictures
from nanorl.types import Status

Format = Literal["atif", "jsonl", "parquet", "otel"]
StoredPhase = Literal["rl", "untrained", "before", "after", "no_tool", "blind", "first_hidden"]
PLACES: dict[str, str] = {
    "atif": "trajectories-atif",
    "jsonl": "trajectories.jsonl",
    "parquet": "trajectories.parquet",
    "otel": "trajectories-otel.jsonl",
}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `nanorl export`."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    to: Format
    """atif (JSON files), jsonl (chats and tokens), parquet (the same), or otel (spans)."""
    out: Path | None = None
    """The file, for atif the folder; default: trajectories.jsonl and so on in the run's folder."""
    endpoint: str = ""
    """For otel: send the spans there, http://HOST:4318, in place of writing a file."""
    phase: StoredPhase = "rl"
    """Rollouts of the training, or of an evaluation that the run itself made."""
    where: str = ""
    """A slice of them, such as "turn=2, failed" or "step=5..9, kind=sums" (docs/store.md)."""
    step: int | None = None
    """Of that training step alone."""
    rollout: str = ""
    """The one with that id alone."""
    min_reward: float | None = None
    """Those with at least this reward alone: 1 is what to imitate."""
    failed: bool = False
    """Those that the infrastructure failed, too."""
    force: bool = False
    """Replace what is there already."""

    def __post_init__(self) -> None:
        if self.to not in get_args(Format):
            raise ValueError(f"--to {self.to}: one of {', '.join(get_args(Format))}")
        if self.phase not in get_args(StoredPhase):
            raise ValueError(f"--phase {self.phase}: one of {', '.join(get_args(StoredPhase))}")
        if self.endpoint and self.to != "otel":
            raise ValueError(f"--endpoint is for --to otel, not for --to {self.to}")
        if self.endpoint and self.out is not None:
            raise ValueError("--endpoint sends the spans, --out writes them: give one of them")
        if self.step is not None and self.phase != "rl":
            raise ValueError(f"--step {self.step}: the evaluation {self.phase} has no steps")
        if self.min_reward is not None:
            check_number("--min-reward ", self.min_reward)

    @property
    def place(self) -> Path:
        """The file or folder that is written."""
        return self.run / PLACES[self.to] if self.out is None else self.out

    def is_chosen(self, entry: Entry) -> bool:
        """Say whether a rollout is exported."""
        if entry.status is Status.FAILED and not self.failed:
            return False
        if self.phase != "rl" and entry.step != PHASES.index(self.phase):
            return False
        is_good = self.min_reward is None or entry.reward >= self.min_reward
        return is_good and self.rollout in ("", entry.rollout_id)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The place of an export, and the number of its rollouts."""

    place: str
    """The file, folder or address."""
    num_rollouts: int


def export_rollouts(options: ExportOptions, *, say: Callable[[str], None] = print) -> Exported:
    """Write, or send, the rollouts of a run. ValueError where there is no such run, where it has no
    such rollouts, or where a package is missing; OSError where they cannot be written, and then
    nothing is. `say` is told what is not as it should be."""
    from nanorl.run.saved_models import read_run, read_tokenizer  # here: it imports torch

    config = read_run(options.run)
    where = Filter.parse(options.where)
    address = _address(options, config)
    _require_packages(options)
    tokenizer = read_tokenizer(options.run)
    with open_for_reading(address) as store:
        found = store.entries(step=options.step, where=where)
        entries = [one for one in found if options.is_chosen(one)]
        if not entries:
            raise ValueError(_why_none(options, store))
        parsers = find_parsers(config, tokenizer, say)
        reader = _Stored(store, TrajectoryReader(tokenizer, parsers), options.phase, entries)
        place = _write(options, config, iter(reader), RunPictures.of(tokenizer))
    return Exported(place=place, num_rollouts=reader.num_read)


def _address(options: ExportOptions, config: RunConfig) -> str:
    if options.phase == "rl":
        return training_store(options.run, config.store)
    file = options.run / EVALUATIONS_FILE
    if not file.is_file():
        raise ValueError(f"{options.run}: has no {file.name}: no rollout of {options.phase} yet")
    return str(file)


class _Stored:
    """The trajectories of a store, one after the other."""

    def __init__(
        self, store: RolloutStore, reader: TrajectoryReader, phase: str, entries: list[Entry]
    ) -> None:
        self._store, self._reader = store, reader
        self._phase, self._entries = phase, entries
        self.num_read = 0

    def __iter__(self) -> Iterator[Trajectory]:
        for entry in self._entries:
            try:
                rollout = self._store.get(entry.rollout_id)
            except KeyError:  # the run goes on, and keeps the newest steps alone
                continue
            step = entry.step if self._phase == "rl" else 0
            yield self._reader.read(rollout, step=step, phase=self._phase)
            self.num_read += 1


def _write(
    options: ExportOptions,
    config: RunConfig,
    found: Iterator[Trajectory],
    pictures: RunPictures | None,
) -> str:
    """Write them; where that is."""
    place, force = options.place, options.force
    agent = agent_info(config)
    if options.to == "jsonl":
        write_jsonl(found, place, force=force)
    elif options.to == "atif":
        write_atif(found, place, agent, force=force, pictures=pictures)
    elif options.to == "parquet":
        # Here: it needs an extra.
        from nanorl.observability.trajectories.parquet import write_parquet

        write_parquet(found, place, force=force)
    else:
        # Here: it imports an extra.
        from nanorl.observability.trajectories.otel import SpanMaker, send_spans, write_spans

        maker = SpanMaker(agent, str(options.run.resolve()))
        if options.endpoint:
            send_spans(found, options.endpoint, maker)
            return options.endpoint
        write_spans(found, place, maker, force=force)
    return str(place)


def _require_packages(options: ExportOptions) -> None:
    """ValueError that names the extra, before anything is read."""
    needed = {
        "parquet": ("data", ["pyarrow"]),
        "otel": ("otel", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"]),
    }
    extra, modules = needed.get(options.to, ("", []))
    for module in modules:
        if not _is_there(module):
            raise missing(f"--to {options.to}", module.replace(".", "-"), extra=extra)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the package that it would be part of
        return False


def _why_none(options: ExportOptions, store: RolloutStore) -> str:
    """The words of the error where nothing is chosen; they say what there is."""
    every = store.entries()
    if options.phase != "rl":
        names = sorted({PHASES[entry.step] for entry in every})
        held = f"it has evaluations: {', '.join(names)}"
    else:
        steps = [entry.step for entry in every]
        held = f"it has steps {min(steps)} to {max(steps)}" if steps else "it has none"
    asked = {
        "--phase": options.phase,
        "--where": options.where or None,
        "--step": options.step,
        "--rollout": options.rollout or None,
        "--min-reward": options.min_reward,
    }
    words = " ".join(f"{name} {one}" for name, one in asked.items() if one is not None)
    return f"{options.run}: no rollout of {words}: {held} ({len(every)} rollouts)"
