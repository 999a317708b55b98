"""`examine_run` reads off a run's folder why it does not learn. Nothing is written into it,
but tables of an earlier version are brought to today's."""

from __future__ import annotations

from pathlib import Path

from nanorl.observability.alarms.finding import Finding
from nanorl.observability.diagnosis.diagnosis import diagnose
from nanorl.observability.diagnosis.run_record import RunRecord, read_record
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.store import open_for_reading
from nanorl.options.store_address import EVALUATIONS_FILE, RL_EVALUATIONS_FILE, training_store
from nanorl.run.missing_records import METRICS
from nanorl.run.saved_models import read_run, read_tokenizer


def examine_run(folder: Path) -> tuple[RunRecord, list[Finding]]:
    """Return the record of a run, and its findings, the worst first. ValueError if the folder is no
    run's, or has no rollouts of RL yet."""
    config = read_run(folder)
    for name in (EVALUATIONS_FILE, RL_EVALUATIONS_FILE):
        if (folder / name).is_file():
            open_for_reading(folder / name).close()
    with open_for_reading(training_store(folder, config.store)) as store:
        rows = read_metrics(folder / METRICS)
        record = read_record(folder, config, rows, store, read_tokenizer(folder))
    return record, diagnose(record)
