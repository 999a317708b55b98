"""Every rollout of a run, found by step, task, type, version, status, hash and what happened in a
turn: SQLite by default, PostgreSQL where many runs share a database. See docs/store.md."""

from nanorl.observability.store.database import EmptyStoreError, OldSchemaError, StoreError
from nanorl.observability.store.filter import Filter
from nanorl.observability.store.rows import Entry, content_hash
from nanorl.observability.store.store import RolloutStore, open_for_reading

__all__ = [
    "EmptyStoreError",
    "Entry",
    "Filter",
    "OldSchemaError",
    "RolloutStore",
    "StoreError",
    "content_hash",
    "open_for_reading",
]
