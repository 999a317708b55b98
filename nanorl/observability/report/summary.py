"""summary.json: the run in one dict whose fields other tools rely on.

Success rates are greedy. `before` is after the warm start and before RL, `untrained` is before
both (without a warm start the two are one evaluation), `no_tool` is the trained model with
execution switched off; `blind` and `first_hidden` are it with pictures hidden. Left out: curves
(metrics.jsonl).
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

FIELDS: dict[str, tuple[type, ...]] = {
    "preset": (str,),
    "seed": (int,),
    "steps": (int,),
    "wall_s": (float, int),
    "heldout_success_before": (float, int),
    "heldout_success_after": (float, int),
    "heldout_n": (int,),
    "heldout_success_untrained": (float, int),
    "heldout_success_no_tool": (float, int),
    "dtype": (str,),
    "logp_gap_max": (float, int),
    "logp_gap_mean": (float, int),
    "tokens_per_s_rollout": (float, int),
    "tokens_per_s_train": (float, int),
    "num_rollouts": (int,),
    "num_failed_rollouts": (int,),
    "peak_rss_bytes": (int,),
    "git_commit": (str,),
}
"""Required, in this order. Those of NULLABLE may be None: not measured in this run."""

NULLABLE = {
    *("heldout_success_before", "heldout_success_after", "heldout_success_untrained"),
    *("heldout_success_no_tool", "logp_gap_max", "logp_gap_mean"),
    *("tokens_per_s_rollout", "tokens_per_s_train", "git_commit"),
}

EVALUATIONS: Mapping[str, str] = MappingProxyType(
    {
        "untrained": "untrained",
        "before": "before RL",
        "after": "after RL",
        "no_tool": "after RL, tool off",
        "blind": "after RL, blind",
        "first_hidden": "after RL, first hidden",
    }
)
"""The titles of the evaluations by the names under which they are stored, in their order."""

HIDING = ("blind", "first_hidden")
"""Those of models that see alone."""

EXTRA_FIELDS: dict[str, tuple[type, ...]] = {
    "logp_gap_steps": (int,),  # in which it was measured; a resumed older run counts from there on
    "logp_gap_share": (float, int),  # measured tokens, of all sampled
    "per_type": (dict,),  # task kind -> PER_TYPE_FIELDS: success rates, and of how many tasks
    "per_environment": (dict,),  # the same by environment, where a run has several
    "phase_wall_s": (dict,),  # phase name -> seconds
    "wall_s_setup": (float, int),
    "wall_s_warm_start": (float, int),
    "wall_s_rl": (float, int),
    "wall_s_evaluation": (float, int),
    "warm_start_steps": (int,),
    "heldout_n_untrained": (int,),
    "heldout_n_no_tool": (int,),
    "heldout_success_blind": (float, int),  # of a model that sees: every picture is grey
    "heldout_success_first_hidden": (float, int),  # the first picture is
    "heldout_n_hidden": (int,),  # tasks of each of the two
    "model": (str,),
    "model_source": (str,),  # what it is a copy of: nanorl/run/cards/model_source.py
    "num_parameters": (int,),
    "date": (str,),
    "hardware": (str,),
    "threads": (int,),
    "command": (str,),
    "torch_version": (str,),
    "sandbox": (str,),  # the back end that ran the agent's programs, or none
    "history": (list,),  # events of nanorl.run.history: how it came to be, with what changed
    "heldout_n_before": (int,),  # another number than heldout_n where it was changed on the way
    "missing": (list,),  # of the records, a sentence for each kind: nanorl/run/missing_records.py
    "evaluations": (list,),  # while RL went on, by the steps done: sampled success of both splits
    "best_step": (int,),  # steps of RL done at the best of them, of which RUN:best is the model
    "findings": (list,),  # why it did not learn: nanorl/observability/diagnosis
    "ways": (dict,),  # to an answer, that the policy found and no teacher showed: report/ways.py
    "status": (str,),  # "finished" or why it ended early
}
"""Optional, after the required ones."""

PER_TYPE_FIELDS = (*EVALUATIONS, *(f"n_{name}" for name in EVALUATIONS), "n")


def success_rates(summary: Mapping[str, Any]) -> list[tuple[str, float | None, int]]:
    """(what it is called, success, number of tasks) of each evaluation; None: not measured. Without
    a warm start nothing lies between `untrained` and `before`, and the latter is left out."""
    num_tasks = {
        "untrained": summary.get("heldout_n_untrained"),
        "before": summary.get("heldout_n_before", summary.get("heldout_n")),
        "after": summary.get("heldout_n"),
        "no_tool": summary.get("heldout_n_no_tool"),
        "blind": summary.get("heldout_n_hidden"),
        "first_hidden": summary.get("heldout_n_hidden"),
    }
    left_out = {"before"} if summary.get("warm_start_steps") == 0 else set()
    left_out |= {one for one in HIDING if f"heldout_success_{one}" not in summary}
    return [
        (title, summary.get(f"heldout_success_{name}"), num_tasks[name] or 0)
        for name, title in EVALUATIONS.items()
        if name not in left_out
    ]


def environment_lines(summary: Mapping[str, Any]) -> list[str]:
    """A line for each environment with its success in every evaluation; none in a run of one."""
    titles = dict(EVALUATIONS)
    if summary.get("warm_start_steps") == 0:
        titles["before"] = titles["untrained"]
    rates = summary.get("per_environment") or {}
    return [
        f"{name:<22} "
        + ", ".join(
            f"{title} {row[one]:.1%} of {row[f'n_{one}']}"
            for one, title in titles.items()
            if one in row
        )
        for name, row in rates.items()
    ]


def gap_text(summary: Mapping[str, Any]) -> str:
    """Say how far apart the log-probs of the two engines were, and on how many tokens and steps
    that was measured."""
    if summary.get("logp_gap_max") is None:
        return "not measured"
    said = f"at most {summary['logp_gap_max']:.2g} nats"
    if "logp_gap_share" not in summary:
        return said
    steps, all_steps = summary["logp_gap_steps"], summary["steps"]
    return (
        f"{said} (on {summary['logp_gap_share']:.0%} of the tokens, {steps} of {all_steps} steps)"
    )


def build_summary(fields: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> dict:
    """The validated summary in its fixed order; ValueError names every field that is wrong."""
    extra = dict(extra or {})
    known = [*FIELDS, *EXTRA_FIELDS]
    merged = {**fields, **extra}
    summary = {name: merged[name] for name in known if name in merged}
    summary.update((name, value) for name, value in merged.items() if name not in summary)
    validate_summary(summary)
    return summary


def validate_summary(summary: Mapping[str, Any]) -> None:
    """ValueError listing the missing, unknown and ill-typed fields."""
    problems = [f"missing field {name!r}" for name in FIELDS if name not in summary]
    values: dict[str, Any] = dict(summary)
    for name, value in values.items():
        types = FIELDS.get(name) or EXTRA_FIELDS.get(name)
        if types is None:
            problems.append(f"unknown field {name!r}; extra ones: {', '.join(EXTRA_FIELDS)}")
        elif value is None and name in NULLABLE:
            continue
        elif type(value) not in types:
            problems.append(f"{name}={value!r} must be {' or '.join(t.__name__ for t in types)}")
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name}={value!r} must be finite, or None where it was not measured")
        elif name.startswith("heldout_success") and not 0 <= value <= 1:
            problems.append(f"{name}={value!r} must lie between 0 and 1: a fraction, not percent")
    for name in ("per_type", "per_environment"):
        problems.extend(_rate_problems(name, summary.get(name)))
    if problems:
        raise ValueError("invalid summary: " + "; ".join(problems))


def _rate_problems(field: str, rates: Any) -> list[str]:
    problems = []
    for kind, row in rates.items() if isinstance(rates, dict) else ():
        for name, value in row.items() if isinstance(row, dict) else [("", row)]:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in PER_TYPE_FIELDS or not (value is None or is_number):
                problems.append(
                    f"{field}[{kind!r}] has {name!r}: {value!r}; give numbers under "
                    f"{', '.join(PER_TYPE_FIELDS)}"
                )
    return problems


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> None:
    """Validates, then replaces the file in one piece: a reader sees the old one or the new one."""
    validate_summary(summary)
    write_atomically(path, json.dumps(dict(summary), indent=2, allow_nan=False) + "\n")


def read_summary(path: str | Path) -> dict[str, Any]:
    """The validated content; ValueError if it is not a summary."""
    try:
        summary = json.loads(Path(path).read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); the run writes it anew at its end"
        ) from error
    validate_summary(summary)
    return summary


def write_atomically(path: str | Path, text: str) -> None:
    """Temporary file in the same folder, fsync, rename. OSError names the file and the fix."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        message = (
            f"cannot write it ({error.strerror}): make room on the disk and check that the folder "
            "is writable"
        )
        raise OSError(error.errno, message, str(path)) from error


def peak_rss_bytes() -> int:
    """The most memory that this process has had so far; children are not counted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kB on Linux


def git_commit(folder: str | Path) -> str | None:
    """The commit of the checkout, with `-dirty` after changes; None outside of one, and where the
    checkout around the folder does not hold its files (an environment in a project of its own).
    Of a checkout whose root is the folder, the code that runs: there, its owner may be another."""
    git = ["git", "-c", f"safe.directory={Path(folder).resolve()}", "-C", str(folder)]
    describe = [*git, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        for command in ([*git, "ls-files", "--error-unmatch", "."], describe):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
