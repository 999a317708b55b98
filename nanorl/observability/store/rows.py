"""A rollout as rows: what it is found by, what it says, what happened in each of its turns.

    found by     `Entry`, a row of plain columns
    turns        a row each: tokens, reward, whether a call of it failed
    content      everything else, one compressed blob that comes back equal to the last bit

The blob is a header of JSON and the per-token lists of all sequences behind each other, each in the
smallest numpy type that holds it exactly, then zstd: a rollout of 1,000 tokens takes a few kB
instead of tens as JSON. Log-probs are fp32 only where fp32 holds every one of them.
Left out: where the rows go (store.py), files of schema 1 (migration.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
import zstandard

from nanoengine.spans import ImageSpan
from nanorl.observability.store.database import Database
from nanorl.types import Branch, Rollout, Status, TokenStats, TurnSpan
from nanorl.unpacking import unzstd

LISTS = ("tokens", "loss_mask", "logps", "versions")
HASH_CHARS = 32
"""128 bits in hexadecimal: two different ones of a million are equal once in 10**26 stores."""
NUM_LENGTH_BYTES = 4  # of the header
NUM_AT_ONCE = 64
"""Rollouts whose rows are made together: so many that it pays, so few that long ones fit."""

ENTRY_COLUMNS = (
    *("rollout_id", "task_id", "group_id", "kind", "step", "version", "status", "reward"),
    *("num_tokens", "num_turns", "num_failed_turns", "content_hash"),
)
_DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
"""What comes of reading a content that nobody wrote so."""
TURN_COLUMNS = ("turn", "num_tokens", "num_observation_tokens", "reward", "is_failed")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The index columns of one stored rollout.

    Entry(rollout_id="s12-t3-m1", task_id="squares-0f3a...", group_id="s12-t3", step=12,
          version=12, status=Status.FINISHED, reward=1.0, num_tokens=143, num_turns=2,
          content_hash="9c1d...", kind="squares", num_failed_turns=1)
    """

    rollout_id: str
    task_id: str
    group_id: str
    step: int
    version: int
    status: Status
    reward: float
    num_tokens: int
    num_turns: int
    content_hash: str
    kind: str = ""
    """The task type."""
    num_failed_turns: int = 0
    """Turns in which a call failed (`has_failed`)."""


class Rows(NamedTuple):
    """A rollout as the values of ENTRY_COLUMNS, rows of TURN_COLUMNS, and its content."""

    entry: tuple[Any, ...]
    turns: list[tuple[Any, ...]]
    content: bytes
    worth: int
    """How late it goes when space is short (expiry.py)."""


class Filed(NamedTuple):
    """The place of a rollout in the store, which it does not know itself."""

    step: int
    version: int | None
    """None: the one that began it."""
    kind: str
    worth: int


def to_rows(rollouts: Sequence[Rollout], filed: Sequence[Filed]) -> list[Rows]:
    """The rows of rollouts, each with where it belongs; `from_content` is the inverse. TypeError
    where `metrics` are not JSON."""
    compress = zstandard.ZstdCompressor().compress
    rows: list[Rows] = []
    for start in range(0, len(rollouts), NUM_AT_ONCE):
        part = slice(start, start + NUM_AT_ONCE)
        rows += _to_rows(rollouts[part], filed[part], compress)
    return rows


def _to_rows(
    rollouts: Sequence[Rollout], filed: Sequence[Filed], compress: Callable[[bytes], bytes]
) -> list[Rows]:
    """Stage by stage for all: the code of a stage stays in the processor's cache."""
    sequences = [one.sequences for one in rollouts]
    packed = [[_packed(sequence) for sequence in each] for each in sequences]
    turns = [list(_turns(in_order(each))) for each in sequences]
    parts_of = zip(rollouts, sequences, packed, strict=True)
    hashes = [_hash(one.task_id, each, arrays) for one, each, arrays in parts_of]
    contents = [_to_content(*each) for each in zip(rollouts, sequences, packed, strict=True)]
    compressed = [compress(content) for content in contents]
    parts = zip(rollouts, filed, sequences, turns, hashes, strict=True)
    entries = [_entry(*each) for each in parts]
    worths = [one.worth for one in filed]
    return [Rows(*each) for each in zip(entries, turns, compressed, worths, strict=True)]


def _entry(
    rollout: Rollout,
    filed: Filed,
    sequences: Sequence[Branch],
    turns: Sequence[tuple[Any, ...]],
    digest: str,
) -> tuple[Any, ...]:
    """The values of ENTRY_COLUMNS."""
    return (
        rollout.rollout_id,
        rollout.task_id,
        rollout.group_id,
        filed.kind,
        filed.step,
        _begun(sequences) if filed.version is None else filed.version,
        rollout.status.value,
        None if math.isnan(rollout.reward) else rollout.reward,  # NULL in any database
        sum(len(one.tokens) for one in sequences),
        len(turns),
        sum(row[-1] for row in turns),
        digest,
    )


def _begun(sequences: Sequence[Branch]) -> int:
    """As `Rollout.version`."""
    return min((one.version for one in sequences if one.version >= 0), default=-1)


def to_entry(row: tuple[Any, ...]) -> Entry:
    """The entry of a row of ENTRY_COLUMNS."""
    fields = dict(zip(ENTRY_COLUMNS, row, strict=True))
    fields["status"] = Status(fields["status"])
    fields["reward"] = math.nan if fields["reward"] is None else fields["reward"]
    return Entry(**fields)


def from_content(entry: Entry, content: bytes) -> Rollout:
    """The rollout of an entry and its content; ValueError if the bytes are damaged."""
    try:
        header, sequences = _unpack_content(content)
        metrics, error, hindsight = header["metrics"], header["error"], header.get("hindsight", [])
        shown = [ImageSpan.from_json(one) for one in header.get("hindsight_images", [])]
        own, *branches = sequences
    except _DAMAGE as fault:
        raise ValueError(f"damaged content of {len(content)} bytes: {fault}") from fault
    lengths = [len(sequence.tokens) for sequence in sequences]
    if sum(lengths) != entry.num_tokens:
        raise ValueError(f"sequences of {lengths} tokens, not {entry.num_tokens} in all")
    return Rollout(
        task_id=entry.task_id,
        group_id=entry.group_id,
        rollout_id=entry.rollout_id,
        reward=entry.reward,
        status=entry.status,
        metrics=metrics,
        error=error,
        hindsight=hindsight,
        hindsight_images=shown,
        branches=branches,
        turn_spans=own.turn_spans,
        turn_rewards=own.turn_rewards,
        turn_metrics=own.turn_metrics,
        kept=own.kept,
        images=own.images,
        **{name: getattr(own, name) for name in LISTS},
    )


def insert_rows(
    db: Database, first: int, rows: Sequence[Rows], places: Sequence[str | None]
) -> None:
    """Insert rollouts as the numbers `first` and following; the content of one that has a place
    lies there."""
    now = time.time()
    columns = ("id", *ENTRY_COLUMNS, "num_bytes", "worth", "stored_at")
    entries = (
        (n, *one.entry, len(one.content), one.worth, now) for n, one in enumerate(rows, first)
    )
    db.insert("rollouts", columns, entries)
    placed = enumerate(zip(rows, places, strict=True), first)
    contents = ((n, None if place else one.content, place) for n, (one, place) in placed)
    db.insert("contents", ("id", "content", "place"), contents)
    turns = ((n, *turn) for n, one in enumerate(rows, first) for turn in one.turns)
    db.insert("turns", ("id", *TURN_COLUMNS), turns)


# -- turns -----------------------------------------------------------------------------------------


def in_order(sequences: Sequence[Branch]) -> list[Branch]:
    """The sequences of a rollout as they were said: histories, its own, those beside it. Turns are
    counted in this order, from 1."""
    own, *branches = sequences
    histories = [branch for branch in branches if branch.is_history]
    return [*histories, own, *(branch for branch in branches if not branch.is_history)]


def has_failed(metrics: Mapping[str, float]) -> bool:
    """Say whether a call of the turn failed, by what the environment counted in it: it could not be
    read, was refused, ended with an error, or its program ended in another way than `ok`."""
    for name, value in metrics.items():
        if value > 0 and name.startswith(_FAILURES) and name != "num_exec_ok":
            return True
    return False


# num_exec_timeout and so on: nanorl.sandbox.base.ExecStatus.
_FAILURES = ("num_tool_errors", "num_refused_calls", "num_malformed_", "num_exec_")


def _turns(sequences: Iterable[Branch]) -> Iterator[tuple[int, int, int, float, int]]:
    """The values of TURN_COLUMNS."""
    turn = 0
    for one in sequences:
        facts = zip_longest(one.turn_spans, one.turn_rewards, one.turn_metrics)
        for span, reward, metrics in list(facts)[: len(one.turn_spans)]:
            turn += 1
            num_tokens = span.action_end - span.action_start
            num_observed = span.observation_end - span.action_end
            yield turn, num_tokens, num_observed, reward or 0.0, int(has_failed(metrics or {}))


# -- content ---------------------------------------------------------------------------------------


class _Packed(NamedTuple):
    """The per-token lists of a sequence as arrays of their smallest types."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    logps: np.ndarray
    versions: np.ndarray


def _packed(sequence: Branch) -> _Packed:
    return _Packed(
        _small(sequence.tokens, "Hiq"),  # few vocabularies have 128 tokens
        _small(sequence.loss_mask, "bhiq"),
        _small_floats(sequence.logps),
        _small(sequence.versions, "bhiq"),
    )


def _small(values: Sequence[int], codes: str) -> np.ndarray:
    """In the first type that holds every one; struct.error beyond 64 bits."""
    for code in codes[:-1]:
        try:
            return _array(values, code)
        except struct.error:
            continue
    return _array(values, codes[-1])


def _array(values: Sequence[float], code: str) -> np.ndarray:
    return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), code)  # asarray takes thrice


def _small_floats(values: Sequence[float]) -> np.ndarray:
    """fp32 if that is exact (as the contract of `Rollout.logps` says), else fp64."""
    exact = _array(values, "d")
    with np.errstate(over="ignore"):
        rounded: np.ndarray = exact.astype(np.float32)
    return rounded if (rounded == exact).all() else exact


def _to_content(rollout: Rollout, sequences: Sequence[Branch], packed: Sequence[_Packed]) -> bytes:
    header: dict[str, Any] = {
        "metrics": rollout.metrics,
        "error": rollout.error,
        "sequences": [
            _about(sequence, one) for sequence, one in zip(sequences, packed, strict=True)
        ],
    }
    if rollout.hindsight:
        header["hindsight"] = rollout.hindsight
    if rollout.hindsight_images:
        header["hindsight_images"] = [asdict(span) for span in rollout.hindsight_images]
    text = _ENCODER.encode(header).encode()
    length = len(text).to_bytes(NUM_LENGTH_BYTES, "little")
    lists = (one.tobytes() for each in packed for one in each)
    return b"".join([length, text, *lists])


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _about(sequence: Branch, packed: _Packed) -> dict[str, Any]:
    spans = [(one.action_start, one.action_end, one.observation_end) for one in sequence.turn_spans]
    about: dict[str, Any] = {
        "num": len(sequence.tokens),
        "dtypes": [one.dtype.str for one in packed],
        "spans": spans,
    }
    further = {
        "turn_rewards": sequence.turn_rewards,
        "turn_metrics": sequence.turn_metrics,
        "kept": sequence.kept,
        "images": [asdict(span) for span in sequence.images],
        "is_history": sequence.is_history,
    }
    return about | {name: value for name, value in further.items() if value}


def _unpack_content(content: bytes) -> tuple[dict[str, Any], list[Branch]]:
    data = unzstd(content)
    place = NUM_LENGTH_BYTES + int.from_bytes(data[:NUM_LENGTH_BYTES], "little")
    header = json.loads(data[NUM_LENGTH_BYTES:place])
    sequences = []
    for about in header["sequences"]:
        lists: dict[str, Any] = {}
        for name, dtype in zip(LISTS, about["dtypes"], strict=True):
            numbers = np.frombuffer(data, dtype, about["num"], place)
            lists[name], place = numbers.tolist(), place + numbers.nbytes
        sequences.append(_to_branch(about, lists))
    return header, sequences


def _to_branch(about: Mapping[str, Any], lists: Mapping[str, Any]) -> Branch:
    spans = [
        TurnSpan(action_start=start, action_end=end, observation_end=observation_end)
        for start, end, observation_end in about["spans"]
    ]
    names = ("turn_rewards", "turn_metrics", "kept", "is_history")
    further = {name: about[name] for name in names if name in about}
    images = [ImageSpan.from_json(one) for one in about.get("images", ())]
    return Branch(turn_spans=spans, images=images, **lists, **further)


def pack_stats(stats: TokenStats) -> bytes:
    """`unpack_stats` is the inverse."""
    flat = [number for lists in stats.values.values() for one in lists for number in one]
    numbers = _small_floats(flat)
    shape = {name: [len(one) for one in lists] for name, lists in stats.values.items()}
    text = json.dumps({"dtype": numbers.dtype.str, "shape": shape}).encode()
    length = len(text).to_bytes(NUM_LENGTH_BYTES, "little")
    return zstandard.compress(b"".join([length, text, numbers.tobytes()]))


def unpack_stats(content: bytes) -> TokenStats:
    """ValueError if the bytes are damaged."""
    data = unzstd(content)
    place = NUM_LENGTH_BYTES + int.from_bytes(data[:NUM_LENGTH_BYTES], "little")
    try:
        header = json.loads(data[NUM_LENGTH_BYTES:place])
        rest = iter(np.frombuffer(data, header["dtype"], offset=place).tolist())
        values = {
            name: [list(islice(rest, length)) for length in lengths]
            for name, lengths in header["shape"].items()
        }
    except _DAMAGE as fault:
        raise ValueError(f"damaged statistics of {len(content)} bytes: {fault}") from fault
    return TokenStats(values=values)


# -- hash ------------------------------------------------------------------------------------------


def content_hash(rollout: Rollout) -> str:
    """128 bits of the SHA-256 of task, tokens, pictures and loss mask: equal where the policy was
    asked and said the same.

    Rewards, log-probs and timings are left out, so that a regenerated rollout can be recognised.
    """
    sequences = rollout.sequences
    return _hash(rollout.task_id, sequences, [_packed(sequence) for sequence in sequences])


def _hash(task_id: str, sequences: Sequence[Branch], packed: Sequence[_Packed]) -> str:
    digest = hashlib.sha256(task_id.encode("utf-8") + b"\0")
    for sequence, one in zip(sequences, packed, strict=True):
        keys = np.array(sequence.keys) if sequence.images else one.tokens
        digest.update(keys.astype("<i8").tobytes())
        digest.update(one.loss_mask.astype("<i8").tobytes())
    return digest.hexdigest()[:HASH_CHARS]
