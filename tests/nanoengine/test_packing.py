"""Packing: budgets, order, the shift inside a sample, and the tree layout of shared prompts."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine import packing
from nanoengine.config import EngineConfig
from nanoengine.heads.scorer import Scorer
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, make_micro_batches
from nanoengine.parallel.dealing import balanced_parts


def sample(tokens: list[int], prompt: int = 1, group: str | None = None) -> Sample:
    mask = [0] * prompt + [1] * (len(tokens) - prompt)
    values = [float(token) / 2 for token in tokens]
    return Sample(tokens=tokens, loss_mask=mask, fields={"half": values}, group=group)


def visible_tokens(micro: MicroBatch, entry: int) -> list[int]:
    """What the model has read when it predicts `entry`: its segment so far, after its prefixes."""
    row = entry if micro.rows_T is None else int(micro.rows_T[entry])
    bounds = micro.cu_seqlens.tolist()
    segment = next(s for s in range(len(bounds) - 1) if bounds[s] <= row < bounds[s + 1])
    read = micro.ids_N[bounds[segment] : row + 1].tolist()
    while micro.prefix_of_S is not None and micro.prefix_of_S[segment] >= 0:
        segment = micro.prefix_of_S[segment]
        read = micro.ids_N[bounds[segment] : bounds[segment + 1]].tolist() + read
    return read


def check_against_definition(samples: list[Sample], micros: list[MicroBatch]) -> None:
    """Every prediction of every sample occurs once, from exactly the tokens before it."""
    seen = []
    for micro in micros:
        for index, entries in micro.split(torch.arange(len(micro.target_ids_T))):
            seen.append(index)
            original = samples[index]
            assert len(entries) == len(original.tokens) - 1
            for t, entry in enumerate(entries.tolist(), start=1):
                assert visible_tokens(micro, entry) == original.tokens[:t]
                assert micro.target_ids_T[entry] == original.tokens[t]
                assert micro.loss_mask_T[entry] == original.loss_mask[t]
                assert micro.fields_T["half"][entry] == original.fields["half"][t]
                assert micro.sequence_ids_T[entry] == index
                row = entry if micro.rows_T is None else int(micro.rows_T[entry])
                assert micro.positions_N[row] == t - 1
    assert sorted(seen) == list(range(len(samples)))


def test_targets_are_shifted_inside_each_sample_by_hand() -> None:
    samples = [sample([5, 6, 7, 8], prompt=2), sample([1, 2, 3])]
    (micro,) = make_micro_batches(samples, 100)
    assert micro.ids_N.tolist() == [5, 6, 7, 1, 2]
    assert micro.positions_N.tolist() == [0, 1, 2, 0, 1]
    assert micro.target_ids_T.tolist() == [6, 7, 8, 2, 3]
    assert micro.loss_mask_T.tolist() == [0, 1, 1, 1, 1]
    assert micro.fields_T["half"].tolist() == [3, 3.5, 4, 1, 1.5]
    assert micro.cu_seqlens.tolist() == [0, 3, 5] and micro.max_seqlen == 3
    assert micro.sequence_ids_T.tolist() == [0, 0, 0, 1, 1]


def test_shared_prompt_is_read_once_by_hand() -> None:
    samples = [sample([9, 8, 1, 2], 2, "a"), sample([9, 8, 3, 4, 5], 2, "a")]
    (micro,) = make_micro_batches(samples, 100, share_prefix=True)
    assert micro.ids_N.tolist() == [9, 8, 1, 3, 4] or micro.ids_N.tolist() == [9, 8, 3, 4, 1]
    assert micro.num_rows == 5  # 2 of the prompt, 1 and 2 of the branches; 3 + 4 unshared
    assert micro.prefix_of_S == [-1, 0, 0]
    check_against_definition(samples, [micro])


token_lists = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=12), st.sampled_from("ab-")),
    min_size=1,
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(token_lists, st.integers(1, 40), st.booleans())
def test_any_batch_packs_to_its_definition(
    drawn: list[tuple[list[int], str]], budget: int, share: bool
) -> None:
    samples = [sample(tokens, 1, None if key == "-" else key) for tokens, key in drawn]
    micros = make_micro_batches(samples, budget, share_prefix=share)
    check_against_definition(samples, micros)
    for micro in micros:
        assert micro.num_rows <= budget or len(micro.index) == 1


def test_length_sorted_and_deterministic() -> None:
    samples = [sample(list(range(n))) for n in (3, 9, 5, 9, 2)]
    first = make_micro_batches(samples, 16)
    second = make_micro_batches(samples, 16)
    assert [micro.index for micro in first] == [[1, 3], [2, 0, 4]]
    for a, b in zip(first, second, strict=True):
        assert a.index == b.index and torch.equal(a.ids_N, b.ids_N)


def test_sharing_counts_each_prompt_once() -> None:
    prompt = list(range(50, 131))
    samples = [sample(prompt + [m] * 64, 81, f"g{m % 2}") for m in range(16)]
    shared = make_micro_batches(samples, 2048, share_prefix=True)
    assert sum(micro.num_rows for micro in shared) == 2 * (81 + 8 * 63)
    plain = make_micro_batches(samples, 2048)
    assert sum(micro.num_rows for micro in plain) == 16 * 144


def test_a_tree_of_three_levels_by_hand() -> None:
    samples = [
        sample([9, 8, 1, 2, 3, 3], 2, "a"),
        sample([9, 8, 1, 2, 4, 4, 4], 2, "a"),
        sample([9, 8, 1, 5, 5], 2, "a"),
        sample([9, 8, 1, 2, 3, 3], 2, "a"),  # the first again
        sample([9, 8, 1], 2, "a"),  # where others fork
        sample([7, 7], 1, "a"),  # shares nothing: a tree of its own
    ]
    (micro,) = make_micro_batches(samples, 100, share_prefix=True)
    check_against_definition(samples, [micro])
    assert micro.ids_N.tolist() == [9, 8, 1, 2, 4, 4, 3, 5, 7]
    assert micro.index == [1, 0, 3, 2, 4, 5]
    assert (micro.bounds, micro.prefix_of_S) == ([0, 3, 4, 6, 7, 8, 9], [-1, 0, 1, 1, 0, -1])
    assert micro.rows_T is not None and micro.scored_Q is not None and micro.copy_of_P is not None
    entries = list(zip(micro.rows_T.tolist(), micro.target_ids_T.tolist(), strict=True))
    counted = [entries[p] for p in micro.counted_P.tolist()]
    distinct = [entries[q] for q in micro.scored_Q.tolist()]
    assert len(counted) == 5 + 4 + 4 + 3 + 1 + 1 and len(distinct) == 5 + 2 + 0 + 2 + 0 + 1
    assert len(set(distinct)) == len(distinct)
    assert [distinct[c] for c in micro.copy_of_P.tolist()] == counted


@pytest.mark.parametrize(
    ("tokens", "mask", "fields", "message"),
    [
        ([1], [0], {}, "at least 2"),
        ([1, 2], [0], {}, "loss_mask has 1 entries"),
        ([1, 2], [1, 1], {}, "first token"),
        ([1, 2], [0, 1], {"adv": [0.0]}, "'adv' has 1 entries"),
    ],
)
def test_malformed_samples_are_refused(
    tokens: list[int], mask: list[int], fields: dict[str, list[float]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Sample(tokens=tokens, loss_mask=mask, fields=fields)


def test_samples_with_different_fields_are_refused() -> None:
    bare = Sample(tokens=[1, 2], loss_mask=[0, 1])
    with pytest.raises(ValueError, match="sample 1 has fields"):
        make_micro_batches([sample([1, 2]), bare], 10)


@given(st.lists(st.integers(2, 60), max_size=30), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_balanced_parts_hold_every_sample_once_and_differ_by_one_sample(
    lengths: list[int], num_parts: int
) -> None:
    samples = [sample(list(range(length))) for length in lengths]
    parts = balanced_parts(samples, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    assert all(part == sorted(part) for part in parts) and len(parts) == num_parts
    rows = [sum(lengths[i] - 1 for i in part) for part in parts]
    assert max(rows) - min(rows) <= max(lengths, default=1) - 1


def test_balanced_parts_by_hand() -> None:
    lengths = (11, 3, 9, 6, 6, 3)  # rows 10 2 8 5 5 2: 10+5+2 and 8+5+2 in two parts
    samples = [sample(list(range(length))) for length in lengths]
    assert balanced_parts(samples, 2) == [[0, 4, 5], [1, 2, 3]]


def test_the_examples_in_the_docstrings_hold() -> None:
    found = doctest.testmod(packing)
    assert found.attempted >= 2 and not found.failed


def test_micro_batches_are_filled_to_less_than_a_tree_may_have() -> None:
    """Rows by hand: a tree of 4 + 2 · 3 rows stays whole beyond the 6 that the others fill."""
    tree = [sample([1, 2, 3, 4, 10 * i + 5, 10 * i + 6, 10 * i + 7, 0], group="a") for i in (1, 2)]
    alone = [sample([1, 2, 3, 4]) for _ in range(5)]
    samples = [*tree, *alone]
    micros = make_micro_batches(samples, 10, share_prefix=True, fill_tokens=6)
    assert [micro.num_rows for micro in micros] == [10, 6, 6, 3]
    check_against_definition(samples, micros)


def test_passes_on_a_cpu_are_filled_to_a_budget_of_activations() -> None:
    """The tiny model keeps so little for a row that the fewest rows of a pass count, 512."""
    model = Transformer(ModelConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=2,
        num_kv_heads=1, head_dim=16, tie_word_embeddings=True,
    ))  # fmt: skip
    samples = [Sample(tokens=[i % 24] * 101, loss_mask=[0] + [1] * 100) for i in range(30)]
    rows = {
        budget: [
            micro.num_rows
            for micro in Scorer(model, micro_batch_tokens=2048, activation_mb=budget).micro_batches(
                samples
            )
        ]
        for budget in (0, 1, 1024)
    }
    assert rows[0] == rows[1024] == [2000, 1000]
    assert rows[1] == [500] * 6
    with pytest.raises(ValueError, match="activation_mb=-1: must be 0"):
        EngineConfig(activation_mb=-1)
