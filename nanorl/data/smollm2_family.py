"""The `smollm2` family: plain English for a small instruction-tuned model with its own template."""

from __future__ import annotations

from nanorl.data import smollm2_numbers as numbers
from nanorl.data import smollm2_sequences as sequences
from nanorl.data import smollm2_turns as turns
from nanorl.data.problem import Family


def smollm2_family() -> Family:
    """Nine kinds of one execution, five that must look or repair first."""
    single = (
        numbers.arithmetic,
        numbers.counting,
        numbers.digits,
        numbers.divisors,
        numbers.bases,
        sequences.lists,
        sequences.strings,
        sequences.times,
        sequences.filtering,
    )
    several = (
        turns.inspect_file,
        turns.inspect_module,
        turns.repair_lines,
        turns.repair_keys,
        turns.repair_types,
    )
    return Family(
        name="smollm2",
        generators={g.__name__: g for g in single + several},
        several_turns=frozenset(g.__name__ for g in several),
    )
