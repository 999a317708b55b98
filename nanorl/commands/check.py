"""`nanorl check`: says what will go wrong with a run, before it is begun.

    nanorl check --env maze.py
    nanorl check --preset tiny --rl.temperature 0.2 --as-json

It takes the options of `nanorl train`. Exit status: 0 the run can work, 1 it cannot, 2
something was wrong with the options. What is looked at: nanorl/inspection/doctor.

    nanorl check --model FOLDER [--as-json]

With no other option it proves a model's folder before any weight loads: what is sampled, what is
trained and what is served are the same tokens. Exit status: 0 they are, or differ only where a
line of the template is named, 2 the model cannot be trained so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from nanorl.observability.alarms.finding import Severity, findings_text
from nanorl.options.run_config import RunConfig
from nanorl.run.parse import parse_arguments

AS_JSON = "--as-json"


def check(arguments: Sequence[str] | None = None) -> int:
    """The verb. `arguments` None: those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = [one for one in words if one.replace("_", "-") == AS_JSON]
    if (source := _model_alone([one for one in words if one not in own])) is not None:
        return _check_model(source, is_json=bool(own))
    config = parse_arguments([one for one in words if one not in own], verb="check")
    import torch  # here, so that a wrong flag is answered at once

    from nanorl.inspection.doctor.checkup import check_run
    from nanorl.observability.report.metrics import to_jsonable

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


def _model_alone(words: Sequence[str]) -> str | None:
    """The value of --model, where it is the only option."""
    if len(words) == 1 and words[0].startswith("--model="):
        return words[0].removeprefix("--model=")
    return words[1] if len(words) == 2 and words[0] == "--model" else None


def _check_model(source: str, *, is_json: bool) -> int:
    from nanoengine.formats.sources import resolve_model  # here: it imports torch
    from nanorl.inspection.doctor.model_check import check_model  # here: it imports torch

    folder = resolve_model(source, RunConfig().cache_dir)
    found = check_model(folder)
    print(json.dumps(found.to_json(), indent=2) if is_json else found.text())
    if found.is_trainable:
        return 0
    errors = [one for one in found.findings if one.severity is Severity.ERROR]
    print(f"error: {errors[0].seen}", file=sys.stderr)
    return 2
