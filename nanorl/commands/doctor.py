"""`nanorl doctor`: the machine, in plain words: what will run, how, and what is missing.

    nanorl doctor
    nanorl doctor --json          # for a program, or for a report of a fault

Exit status: 0 the default run can work here, 1 it cannot. What one run will do, `nanorl check`
says. What is looked at: nanorl/inspection/doctor/examination.py.
"""

from __future__ import annotations

import json as json_module
import sys

from nanorl.inspection.doctor.examination import examine_machine


def doctor(*, json: bool = False) -> int:
    """Say what this machine has, what will run on it and how, and what to mend.

    Args:
        json: Print JSON instead of words.
    """
    found = examine_machine(lambda text: print(text, file=sys.stderr, flush=True))
    if json:
        print(json_module.dumps(found.to_json(), indent=2))
    else:
        print(f"\n{found.text()}\n\nIf you report a fault, please paste all of this.")
    return 0 if found.is_workable else 1
