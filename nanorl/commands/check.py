"""`nanorl check`: says what will go wrong with a run, before it is begun.

    nanorl check --env maze.py
    nanorl check --preset tiny --rl.temperature 0.2 --as-json

It takes the options of `nanorl train`. Exit status: 0 the run can work, 1 it cannot, 2
something was wrong with the options. What is looked at: nanorl/doctor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from nanorl.doctor.finding import findings_text
from nanorl.options import parse_arguments

AS_JSON = "--as-json"


def check(arguments: Sequence[str] | None = None) -> int:
    """The verb. `arguments` None: those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = [one for one in words if one.replace("_", "-") == AS_JSON]
    config = parse_arguments([one for one in words if one not in own], verb="check")
    import torch  # here, so that a wrong flag is answered at once

    from nanorl.doctor.checkup import check_run
    from nanorl.report.metrics import to_jsonable

    torch.set_num_threads(1)  # of this thread: the engine's own uses several
    print("playing a few rollouts with the untrained model ...", file=sys.stderr, flush=True)
    checkup = check_run(config)
    if own:
        print(json.dumps(to_jsonable(checkup.to_json()), indent=2))
    else:
        parts = (
            checkup.example,
            checkup.summary(),
            findings_text(checkup.findings),
            f"verdict: {checkup.verdict}",
        )
        print("\n\n".join(part for part in parts if part))
    return 0 if checkup.is_workable else 1
