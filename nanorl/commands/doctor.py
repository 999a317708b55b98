"""`nanorl doctor` says what ails this machine, or a run that does not learn.

    nanorl doctor                      # the machine: what will run, how, and what is missing
    nanorl doctor runs/mine            # a run, finished or not: why it does not learn
    nanorl doctor runs/mine --json     # for a program, or for a report of a fault

Exit status: 0 the default run can work here, or nothing is wrong with the run but what a note says;
1 it cannot, or there is a warning; 2 the folder is no run's. What one run will do, `nanorl check`
says. What is looked at: nanorl/inspection/doctor/examination.py of the machine, and of a run
nanorl/observability/diagnosis.
"""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from nanorl.inspection.doctor.examination import examine_machine
from nanorl.observability.alarms.finding import Severity, findings_text


def doctor(
    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None,
    /,
    *,
    json: bool = False,
) -> int:
    """Say what this machine has and what to mend; of a run, why it does not learn.

    Args:
        run: A run's folder, finished or not. Without one the machine is examined.
        json: Print JSON instead of words.
    """
    if run is not None:
        return _of_run(run, is_json=json)
    found = examine_machine(lambda text: print(text, file=sys.stderr, flush=True))
    if json:
        print(json_module.dumps(found.to_json(), indent=2))
    else:
        print(f"\n{found.text()}\n\nIf you report a fault, please paste all of this.")
    return 0 if found.is_workable else 1


def _of_run(run: Path, *, is_json: bool) -> int:
    # Here: they import torch.
    from nanorl.inspection.doctor.run_examination import examine_run
    from nanorl.observability.diagnosis.diagnosis import nothing_found

    record, findings = examine_run(run)
    is_ill = any(one.severity < Severity.NOTE for one in findings)
    if is_json:
        about: dict[str, Any] = {"run": str(run), "steps": record.num_steps, "is_ill": is_ill}
        print(
            json_module.dumps(about | {"findings": [one.to_json() for one in findings]}, indent=2)
        )
    else:
        print(record.text())
        print(findings_text(findings, len(findings)) or nothing_found(record))
    return int(is_ill)
