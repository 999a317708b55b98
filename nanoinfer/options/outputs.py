"""Answers that come in parts, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from nanoinfer.params import Output


def joined(first: Output, rest: Output) -> Output:
    """The `first` output, which was cut short, with the `rest` of the request that went on."""
    return replace(
        rest,
        ids=first.ids + rest.ids,
        logps=first.logps + rest.logps,
        versions=first.versions + rest.versions,
        cache_versions=first.cache_versions + rest.cache_versions,
        top_logps=first.top_logps + rest.top_logps,
        sampled_logps=first.sampled_logps + rest.sampled_logps,
        num_cached_tokens=first.num_cached_tokens,
    )


def output_from_json(given: Mapping[str, Any]) -> Output:
    """The output that `dataclasses.asdict` and JSON have made lists of. `ValueError` for
    anything else."""
    known = [one.name for one in fields(Output)]
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"output.{name}: unknown; choose from {', '.join(known)}")
        if isinstance(getattr(Output(), name), list) and not isinstance(value, list):
            raise ValueError(f"output.{name}: must be a list, not {type(value).__name__}")
    try:
        columns: dict[str, list[Any]] = {
            name: [[(int(token), float(logp)) for token, logp in row] for row in given[name]]
            for name in ("top_logps", "prompt_top_logps")
            if name in given
        }
        for name, kind in (
            ("ids", int),
            ("versions", int),
            ("cache_versions", int),
            ("logps", float),
        ):
            columns[name] = [kind(value) for value in given.get(name, ())]
        return Output(**{**given, **columns})
    except (TypeError, ValueError) as error:
        raise ValueError(f"output: {error}") from error
