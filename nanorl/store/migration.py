"""Reads rollout files of schemas 1 and 2, in which each per-token list was a blob of its own, and
writes them anew, in one transaction: a process that dies leaves the old file."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nanorl.store.database import STEP_SHIFT, Database
from nanorl.store.rows import HASH_CHARS, LISTS, insert_rows, pack_stats, to_rows
from nanorl.types import Branch, Rollout, Status, TokenStats, TurnSpan, kind_of

COLUMNS = (
    *("rollout_id", "task_id", "group_id", "step", "version", "status", "reward", "content_hash"),
    *("extra", *LISTS),
)
NUM_AT_ONCE = 500
INDEXES = ("step", "task", "group", "version", "hash", "status", "kind")


def migrate(db: Database, found: int) -> None:
    """From schema `found`, inside a transaction. ValueError if a row is damaged."""
