"""Requests that are in flight when new weights come, where their caches stay."""

from __future__ import annotations

from nanoinfer.scheduler import BatchScheduler


def keep_all(queues: BatchScheduler, version: int) -> None:
    """Let running sequences go on with what they have cached, though the weights changed from
    those of `version`; but those whose prompt is scored are sent back, since all its scores are
    to be of one version."""
    queues.restart([seq for seq in queues.running if seq.params.prompt_logps])
    for seq in queues.running:
        queues.end_prefill(seq)  # nobody waits for a prefix that cannot be shared
        seq.keeps_old_cache = True
        if seq.oldest_version is None:
            seq.oldest_version = version
