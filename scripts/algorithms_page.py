"""Writes parts of docs/algorithms.md: settings from the specs, figures from benchmarks/.

    python scripts/algorithms_page.py            # says what would change; exit status 1 if anything
    python scripts/algorithms_page.py --write

A recipe's part stands below its heading, `### NAME`, between two marks, which are put there where
they are missing: a new recipe needs its heading and its text, no more. Figures are of the newest
algorithms_*.json and, for tables of their own, of the newest file of each name in `TABLES`,
each the comparison.json of compare_algorithms.py.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from bench_output import ROOT
from generated_part import GeneratedPart, newest

from nanorl.algorithms.recipes import RECIPES
from nanorl.algorithms.spec import AlgorithmSpec

PAGE = ROOT / "docs" / "algorithms.md"
UNMEASURED = "not measured yet"
TABLES = ("hard", "reuse", "distill", "staleness")
"""Comparisons that are tables of their own, by what their files in benchmarks/ begin with."""
ELSEWHERE = "hard"
"""The one of them that has all recipes, those too that came after the first table was measured."""


def parts(
    measured: dict[str, Any] | None, tables: Mapping[str, dict[str, Any] | None]
) -> dict[str, str]:
    """Every generated part by its name; `tables` are by the names in `TABLES`."""
    hard = tables.get(ELSEWHERE)
    rows = {row["name"]: row for row in rows_of(measured)}
    later = {row["name"]: row for row in rows_of(hard) if row["name"] not in rows}
    found = {"overview": overview(rows, later), "conditions": _conditions(measured, "algorithms")}
    for name, recipe in RECIPES.items():
        own = f"`--algorithm {name}`: {settings(recipe.spec)}\n"
        said = figure(name, rows.get(name), measured)
        if name in later:
            said = f"With `--variants {ELSEWHERE}` alone. {figure(name, later[name], hard)}"
        found[name] = f"{own}\n{said}\n"
    return found | {name: _table(name, comparison) for name, comparison in tables.items()}


def rows_of(measured: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The variants that ran, their options without those that all have."""
    rows = [row for row in (measured or {}).get("rows", []) if row["runs"]]
    shared = len(common_words(measured))
    return [row | {"options": " ".join(row["options"].split()[shared:])} for row in rows]


def common_words(measured: Mapping[str, Any] | None) -> list[str]:
    """The options with which all of several variants begin, each with its value."""
    rows = [row["options"].split() for row in (measured or {}).get("rows", []) if row["runs"]]
    if len(rows) < 2:
        return []
    words = [one[0] for one in takewhile(lambda one: len(set(one)) == 1, zip(*rows, strict=False))]
    return words[:-1] if words and words[-1].startswith("--") else words  # its values differ


def changed(spec: AlgorithmSpec) -> dict[str, Any]:
    """The fields in which a recipe differs from the default, which is GRPO."""
    default = AlgorithmSpec()
    return {
        one.name: getattr(spec, one.name)
        for one in dataclasses.fields(spec)
        if getattr(spec, one.name) != getattr(default, one.name)
    }


def settings(spec: AlgorithmSpec) -> str:
    """What differs, and the clip where the loss has one of its own."""
    said = [f"`{name.replace('_', '-')}` {_shown(v)}" for name, v in changed(spec).items()]
    low, high = spec.clip
    if (low, high) != AlgorithmSpec().clip and spec.clip_low is spec.clip_high is None:
        said.append(f"the loss brings its bounds, {low:g} below and {high:g} above")
    return ", ".join(said) + "." if said else "the defaults of `--rl.algorithm`."


def _shown(value: Any) -> str:
    if value is None:
        return "off"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def figure(name: str, row: Mapping[str, Any] | None, measured: Mapping[str, Any] | None) -> str:
    """Our figure of a recipe, in one or two sentences."""
    if row is None or measured is None:
        return f"Ours: {UNMEASURED}."
    gain, share = row["gain"], row["share_of_baseline"]
    baseline = measured["baseline"]
    compared = "" if share is None or name == baseline else f", {share:.2f} of {baseline}'s"
    seeds = "1 seed" if row["num_seeds"] == 1 else f"{row['num_seeds']} seeds"
    own = f" With `{row['options']}`: {row['reason']}." if row["reason"] else ""
    note = f" Why so little: {row['note']}." if row["is_little"] and row["note"] else ""
    return (
        f"Ours: {row['before']:.1%} → {row['after']['value']:.1%}, {100 * gain['value']:+.1f} "
        f"points{_interval(gain)}{compared}, in {row['wall_s']:.0f} s and "
        f"{row['sampled_tokens']:,.0f} sampled tokens ({seeds}).{own}{note}"
    )


def _interval(measured: Mapping[str, Any]) -> str:
    low, high = measured["low"], measured["high"]
    return "" if low is None else f" ({100 * low:+.1f} to {100 * high:+.1f})"


def overview(rows: Mapping[str, Mapping[str, Any]], later: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of all recipes; those that came `later` were measured elsewhere."""
    lines = ["| recipe | advantage | loss | what else differs | gain, points |", "|---" * 5 + "|"]
    for name, recipe in RECIPES.items():
        spec, row = recipe.spec, rows.get(name)
        others = changed(spec).keys() - {"advantage", "loss"}
        rest = ", ".join(one.replace("_", "-") for one in changed(spec) if one in others) or "–"
        gain = UNMEASURED
        if row is not None:
            gain = f"{row['value']:+.1f}{_interval(row['gain'])}"
        elif name in later:
            gain = (
                f"`{ELSEWHERE}` alone: {later[name]['value']:+.1f}{_interval(later[name]['gain'])}"
            )
        lines.append(f"| [{name}](#{name}) | {spec.advantage} | {spec.loss} | {rest} | {gain} |")
    return "\n".join(lines) + "\n"


def _conditions(measured: Mapping[str, Any] | None, kind: str) -> str:
    if measured is None:
        return f"No comparison lies in `benchmarks/` as `{kind}_DATE.json` yet.\n"
    return (
        f"Measured on {measured['date']} ({measured['hardware']}): preset {measured['preset']}, "
        f"{measured['steps']} RL steps{_in_all(measured)}, {_seeds(measured['seeds'])}; "
        f"`{measured['command']}`, "
        f"[benchmarks/{measured['file']}](../benchmarks/{measured['file']}).\n"
    )


def _in_all(measured: Mapping[str, Any]) -> str:
    words = common_words(measured)
    others = any("--rl.steps" in row["options"] for row in rows_of(measured))
    said = " (or what the options say)" if others else ""
    return f"{said} with `{' '.join(words)}`" if words else said


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _table(name: str, measured: dict[str, Any] | None) -> str:
    """A line for every variant that ran."""
    said = _conditions(measured, name)
    rows = rows_of(measured)
    if not rows or measured is None:
        return said
    said = f"{differences(rows, measured['baseline'])}\n\n{said}"
    level = f"{measured['level']:.0%}"
    titles = ["variant", "options", "gain, points", f"× {measured['baseline']}"]
    titles += [f"steps to {level}", f"s to {level}"]
    lines = ["", f"| {' | '.join(titles)} |", "|---|---|---|---:|---:|---:|"]
    for row in rows:
        cells = [row["name"], f"`{row['options']}`", f"{row['value']:+.1f}{_interval(row['gain'])}"]
        cells += [_number(row["share_of_baseline"], ".2f"), _number(row["step_to_level"], ".3g")]
        lines.append(f"| {' | '.join([*cells, _number(row['seconds_to_level'], '.0f')])} |")
    return said + "\n".join(lines) + "\n"


def differences(rows: Sequence[Mapping[str, Any]], baseline: str) -> str:
    """Which variants are better or worse than the baseline by more than their intervals say; one
    without an interval cannot be told from it."""
    found: dict[str, list[str]] = {"better": [], "worse": [], "alike": []}
    for row in rows:
        against = row.get("against_baseline")
        if against is None or row["name"] == baseline:
            continue
        if against["low"] is None or against["low"] <= 0 <= against["high"]:
            found["alike"].append(row["name"])
        else:
            found["better" if against["value"] > 0 else "worse"].append(row["name"])
    total = sum(map(len, found.values()))
    said = [
        f"{what} than {baseline} {'is' if len(found[what]) == 1 else 'are'} "
        f"{', '.join(found[what]) or 'none'}"
        for what in ("better", "worse")
    ]
    alike = f"{len(found['alike'])} of {total} variants cannot be told from it"
    text = "; ".join([*said, alike])
    return f"{text[0].upper()}{text[1:]}."


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def written(page: str, found: Mapping[str, str]) -> str:
    """The page with every part in its place. ValueError names the sections that it lacks."""
    if missing := sections_missing(page):
        raise ValueError(
            f"docs/algorithms.md has no section for {', '.join(missing)}; write one under the "
            f"heading '### {missing[0]}': idea, formula, when to use it and when not, source, code"
        )
    for name, text in found.items():
        part = GeneratedPart(name, "algorithms_page.py")
        if part.begin not in page:
            page = page.replace(f"\n### {name}\n", f"\n### {name}\n\n{part.place}", 1)
        page = part.put(page, text)
    return page


def sections_missing(page: str) -> list[str]:
    """The recipes without a section."""
    heads = set(re.findall(r"^### (\S+)$", page, re.MULTILINE))
    return [name for name in RECIPES if name not in heads]


def main(arguments: Sequence[str]) -> int:
    page = PAGE.read_text("utf-8")
    new = written(page, parts(newest("algorithms"), {name: newest(name) for name in TABLES}))
    if new == page:
        return 0
    if "--write" in arguments:
        PAGE.write_text(new, "utf-8")
        return 0
    print("docs/algorithms.md is not what the specs and benchmarks say; call this with --write")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
