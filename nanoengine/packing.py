"""Samples in, packed micro-batches out: no padding, a token budget, and an order that never varies.

A sample of n tokens has n - 1 predictions: token t is predicted from tokens 0..t-1. So the model
reads tokens 0..n-2 and every per-prediction tensor covers tokens 1..n-1; the shift by one happens
here, inside each sample, and a packed neighbour is never a target.

With `share_prefix`, members of one group (same `Sample.group`) that begin alike become a tree
(prefix_tree.py), of any depth: every distinct token is read once, whatever follows it hangs below
as branches. The tensors that the loss sees are the same in both layouts, each sample has its own
predictions with its own mask and fields; `rows_T` says which row of the model's output predicts
each of them. Where several samples count the same prediction of a row, its log-prob is computed
once (`scored_Q`).

Left out: padding to fixed shapes and splitting one sample over micro-batches. A sample that is
longer than the budget gets a micro-batch of its own.

Legend: N rows the model reads, T predictions, P counted ones, Q distinct ones of those, S segments
(sequences, or the runs between the forks of a tree).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import pairwise
from pkgutil import resolve_name

import torch
from torch import Tensor

from kernels.memory import to_device, to_host
from nanoengine.prefix_tree import added_rows, cut, depth_first, lay_out
from nanoengine.spans import ImageSpan, content_ids

_CHECK_SPANS = "nanoengine.vision.span_checks:check_spans"


@dataclass(frozen=True, eq=False)
class TopTokens:
    """At each token of a sample the k tokens that some policy, a teacher, held likeliest there, and
    its log-probs of them in nats; all 0 where it was not asked.

        TopTokens(ids=tensor([[0, 0], [8, 9]]), logps=tensor([[0.0, 0.0], [-0.1, -2.5]]))
    """

    ids: Tensor  # int64 [tokens, k]
    logps: Tensor  # fp32 [tokens, k]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence to train on. `loss_mask[t]` is 1 where token t was sampled by the policy.

    A prompt of two tokens, and two that the policy sampled with an advantage of 0.5:

    >>> sample = Sample(
    ...     tokens=[5, 6, 8, 9], loss_mask=[0, 0, 1, 1], fields={"advantage": [0, 0, 0.5, 0.5]}
    ... )

    `fields` are per-token numbers (advantages, rollout logps, ...), aligned with `tokens`.
    `group` names samples that may share the forward pass of their common leading tokens. `targets`,
    where given, are scored in place of `tokens`: at t the token `targets[t]`. `top`, where given,
    are tokens that are scored beside them. `kept[t]`, where given, is all that `tokens[t]` was
    drawn from, the vocabulary where empty. `images` are the pictures among `tokens`, in order.
    `kind` is its task's, for scorers that ask by kind.
    """

    tokens: list[int]
    loss_mask: list[int]
    fields: dict[str, list[float]] = field(default_factory=dict)
    group: str | None = None
    targets: list[int] | None = None
    top: TopTokens | None = None
    kept: list[list[int]] | None = None
    images: Sequence[ImageSpan] = ()
    kind: str = ""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if n < 2:
            raise ValueError(f"a sample has {n} token(s): it needs at least 2 (one is predicted)")
        lists: dict[str, Sized | None] = {f"field {k!r}": x for k, x in self.fields.items()}
        lists |= {"loss_mask": self.loss_mask, "targets": self.targets, "kept": self.kept}
        for name, values in lists.items():
            if values is not None and len(values) != n:
                raise ValueError(f"{name} has {len(values)} entries for {n} tokens")
        if self.top is not None and not len(self.top.ids) == len(self.top.logps) == n:
            raise ValueError(f"top has {len(self.top.ids)} entries for {n} tokens")
        if self.loss_mask[0]:
            raise ValueError("loss_mask[0] is set: the first token has nothing to predict it from")
        if self.images:
            resolve_name(_CHECK_SPANS)(self.tokens, self.loss_mask, self.images)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass. Sample `index[i]` of the batch owns predictions
    `starts[i]:starts[i + 1]`, in token order: its tokens 1..n-1.

    Two samples of 4 and 2 tokens are 3 + 1 rows, and as many predictions:

    >>> long = Sample(tokens=[5, 6, 8, 9], loss_mask=[0, 0, 1, 1])
    >>> short = Sample(tokens=[5, 7], loss_mask=[0, 1])
    >>> (micro,) = make_micro_batches([short, long], max_tokens=16)
    >>> micro.ids_N.tolist(), micro.positions_N.tolist(), micro.bounds
    ([5, 6, 8, 5], [0, 1, 2, 0], [0, 3, 4])
    >>> micro.target_ids_T.tolist(), micro.loss_mask_T.tolist()
    ([6, 8, 9, 7], [0.0, 1.0, 1.0, 1.0])
    >>> micro.index, micro.starts  # the longer one comes first
    ([1, 0], [0, 3, 4])
    """

    ids_N: Tensor  # int64, what the model reads
    positions_N: Tensor  # int64, within each sample
    cu_seqlens: Tensor  # int32 [S + 1], segments of the rows
    bounds: list[int]  # the same, for the host
    max_seqlen: int
    prefix_of_S: list[int] | None  # the segment each one continues, -1 for none; None: all -1
    rows_T: Tensor | None  # int64, row that predicts each entry; None: row t predicts entry t
    target_ids_T: Tensor  # int64, the predicted tokens
    loss_mask_T: Tensor  # fp32, 1 where the predicted token counts
    fields_T: dict[str, Tensor]  # fp32, of the predicted tokens
    counted_P: Tensor  # int64, the entries whose loss mask is not 0
    scored_Q: Tensor | None  # int64, the first of each row and target among them; None: all differ
    copy_of_P: Tensor | None  # int64, the place in scored_Q of what a counted entry has too
    sequence_ids_T: Tensor  # int64, index of the sample in the whole batch
    local_ids_T: Tensor  # the same, counted among the samples of the micro-batch
    index: list[int]
    starts: list[int]
    top_ids_TK: Tensor | None = None  # int64, of `Sample.top`
    top_logp_TK: Tensor | None = None  # fp32, likewise
    own_top_logp_TK: Tensor | None = None  # the model's of the same tokens, which engines fill in
    kept_T: list[list[int]] | None = None  # of `Sample.kept`
    images: list[Sequence[ImageSpan]] | None = None  # of each sample of `index`; None: no pictures

    @property
    def num_rows(self) -> int:
        return self.ids_N.shape[0]

    def split(self, values_T: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(index of the sample in the batch, its predictions), sample by sample."""
        for i, sample_index in enumerate(self.index):
            yield sample_index, values_T[self.starts[i] : self.starts[i + 1]]


@dataclass(frozen=True)
class _Tree:
    """Samples whose leading rows are read once, in depth-first order; or a single one."""

    members: tuple[int, ...]
    num_rows: int


def make_micro_batches(
    samples: Sequence[Sample],
    max_tokens: int,
    *,
    share_prefix: bool = False,
    fill_tokens: int | None = None,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Pack `samples` into micro-batches of at most `max_tokens` rows, longest first. Nothing is put
    beside what then makes more than `fill_tokens` rows, if that is less; trees are cut at
    `max_tokens` alone, because every part reads its leading rows again.

    Sorting by length puts like with like, so that attention pads little; ties keep the order of
    the batch. The result is a function of the arguments alone.
    """
    if not samples:
        raise ValueError("no samples: a batch needs at least one")
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 1")
    names = set(samples[0].fields)
    for i, sample in enumerate(samples):
        if set(sample.fields) != names:
            raise ValueError(f"sample {i} has fields {sorted(sample.fields)}, not {sorted(names)}")
    widths = {0 if sample.top is None else sample.top.ids.shape[1] for sample in samples}
    if len(widths) > 1:
        raise ValueError(f"samples with {sorted(widths)} top tokens: all must have as many")
    trees = list(_trees(samples, max_tokens, share_prefix))
    trees.sort(key=lambda tree: (-max(len(samples[i].tokens) for i in tree.members), tree.members))
    device = torch.device(device)
    bins = _fill(trees, max_tokens if fill_tokens is None else min(fill_tokens, max_tokens))
    return [to_device(_pack(samples, trees), device) for trees in bins]


def _trees(samples: Sequence[Sample], max_tokens: int, share_prefix: bool) -> Iterator[_Tree]:
    for members in groups_of(samples) if share_prefix else [[i] for i in range(len(samples))]:
        rows = [read_keys(samples[i]) for i in members]
        for part in cut(rows, depth_first(rows), max_tokens):
            num_rows = sum(added_rows([rows[k] for k in part]))
            yield _Tree(tuple(members[k] for k in part), num_rows)


def groups_of(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of the samples that may share rows; a sample without a group is alone."""
    groups: dict[object, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(i if sample.group is None else sample.group, []).append(i)
    return list(groups.values())


def read_keys(sample: Sample) -> list[int]:
    """The content ids that the model reads of a sample: its last token is only predicted."""
    ids = content_ids(sample.tokens, sample.images) if sample.images else sample.tokens
    return ids[:-1]


def _fill(trees: list[_Tree], max_tokens: int) -> Iterator[list[_Tree]]:
    taken: list[_Tree] = []
    num_rows = 0
    for tree in trees:
        if taken and num_rows + tree.num_rows > max_tokens:
            yield taken
            taken, num_rows = [], 0
        taken.append(tree)
        num_rows += tree.num_rows
    yield taken


def _pack(samples: Sequence[Sample], trees: list[_Tree]) -> MicroBatch:
    """Build the tensors, on the CPU."""
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    cu_seqlens, starts = [0], [0]
    prefix_of: list[int] = []
    index: list[int] = []

    for tree in trees:
        layout = lay_out([read_keys(samples[i]) for i in tree.members])
        first, first_segment = len(ids), len(prefix_of)
        ids += layout.ids
        positions += layout.positions
        cu_seqlens += [first + start for start in [*layout.starts[1:], len(layout.ids)]]
        prefix_of += [-1 if p < 0 else first_segment + p for p in layout.parents]
        for i, path in zip(tree.members, layout.paths, strict=True):
            for span in samples[i].images:  # placeholders in place of content ids
                for t in range(span.start, min(span.end, len(path))):
                    ids[first + path[t]] = samples[i].tokens[t]
            rows += [first + row for row in path]
            starts.append(len(rows))
            index.append(i)

    def per_prediction(values: list[list[float]] | list[list[int]]) -> Tensor:
        flat = [x for i in index for x in values[i][1:]]
        return torch.tensor(flat, dtype=torch.float32)

    loss_mask_T = per_prediction([s.loss_mask for s in samples])
    target_ids = [token for i in index for token in (samples[i].targets or samples[i].tokens)[1:]]
    counted_P = loss_mask_T.nonzero().squeeze(1)
    has_tree = any(len(tree.members) > 1 for tree in trees)
    top_ids_TK, top_logp_TK = _top_tokens([samples[i] for i in index])
    kept_T = _kept_tokens([samples[i] for i in index])
    scored_Q, copy_of_P = None, None
    if has_tree:
        beside = kept_T if top_ids_TK is None else top_ids_TK.tolist()
        scored_Q, copy_of_P = _distinct(counted_P, rows, target_ids, beside)
    place = {i: rank for rank, i in enumerate(sorted(index))}
    sequence_ids = [i for i in index for _ in samples[i].tokens[1:]]
    lengths = [end - begin for begin, end in pairwise(cu_seqlens)]
    return MicroBatch(
        ids_N=torch.tensor(ids),
        positions_N=torch.tensor(positions),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        bounds=cu_seqlens,
        max_seqlen=max(lengths),
        prefix_of_S=prefix_of if max(prefix_of) >= 0 else None,
        rows_T=torch.tensor(rows) if has_tree else None,
        target_ids_T=torch.tensor(target_ids),
        loss_mask_T=loss_mask_T,
        fields_T={
            name: per_prediction([s.fields[name] for s in samples]) for name in samples[0].fields
        },
        counted_P=counted_P,
        scored_Q=scored_Q,
        copy_of_P=copy_of_P,
        sequence_ids_T=torch.tensor(sequence_ids),
        local_ids_T=torch.tensor([place[i] for i in sequence_ids]),
        index=index,
        starts=starts,
        top_ids_TK=top_ids_TK,
        top_logp_TK=top_logp_TK,
        kept_T=kept_T,
        images=_pictures([samples[i] for i in index]),
    )


def _top_tokens(samples: Sequence[Sample]) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """`MicroBatch.top_ids_TK` and `top_logp_TK`; nothing where the samples have none."""
    tops = [sample.top for sample in samples if sample.top is not None]
    if not tops:
        return None, None
    ids_TK = torch.cat([top.ids[1:].to(torch.int64) for top in tops])
    return ids_TK, torch.cat([top.logps[1:].to(torch.float32) for top in tops])


def _kept_tokens(samples: Sequence[Sample]) -> list[list[int]] | None:
    """`MicroBatch.kept_T`; nothing where the samples have none."""
    if not any(sample.kept for sample in samples):
        return None
    return [ids for one in samples for ids in (one.kept or [[]] * len(one.tokens))[1:]]


def _pictures(samples: Sequence[Sample]) -> list[Sequence[ImageSpan]] | None:
    return [one.images for one in samples] if any(one.images for one in samples) else None


def _distinct(
    counted_P: Tensor, rows: list[int], target_ids: list[int], beside_T: list[list[int]] | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """`MicroBatch.scored_Q` and `copy_of_P`; nothing where no two counted entries are the same."""
    scored: list[int] = []
    place: dict[tuple[int, ...], int] = {}
    copies: list[int] = []
    for entry in counted_P.tolist():
        prediction = rows[entry], target_ids[entry], *(beside_T[entry] if beside_T else ())
        if prediction not in place:
            place[prediction] = len(scored)
            scored.append(entry)
        copies.append(place[prediction])
    if len(scored) == len(copies):
        return None, None
    return torch.tensor(scored), torch.tensor(copies)


def zeros_like_tokens(samples: Sequence[Sample]) -> list[Tensor]:
    return [torch.zeros(len(sample.tokens)) for sample in samples]


def collect_all(
    samples: Sequence[Sample], micros: Sequence[MicroBatch], values_T: Sequence[Tensor]
) -> list[Tensor]:
    """For each sample its values, of all micro-batches' ones; the host waits once for them."""
    found = zeros_like_tokens(samples)
    for micro, values in zip(micros, to_host(values_T), strict=True):
        collect(found, micro, values)
    return found


def collect(per_sample: list[Tensor], micro: MicroBatch, values_T: Tensor) -> None:
    """Put a micro-batch's values where its samples are; the first token of each has none: 0."""
    for index, values in micro.split(values_T.cpu()):
        per_sample[index] = torch.cat([values.new_zeros(1, *values.shape[1:]), values])


def read_sums(
    losses: Sequence[Tensor], sums_of: Sequence[Mapping[str, Tensor | float]]
) -> tuple[float, dict[str, float]]:
    """The losses of all micro-batches added, and their statistics by name, in one copy."""
    on_device = [x.detach() for sums in sums_of for x in sums.values() if isinstance(x, Tensor)]
    found = [float(x) for x in to_host([*losses, *on_device])]
    stats: dict[str, float] = {}
    values = iter(found[len(losses) :])
    for sums in sums_of:
        read = {name: next(values) if isinstance(x, Tensor) else x for name, x in sums.items()}
        add_sums(stats, read)
    total = 0.0
    for loss in found[: len(losses)]:
        total += loss
    return total, stats


def add_sums(totals: dict[str, float], sums: Mapping[str, Tensor | float]) -> None:
    """Add a loss function's statistics to those of the micro-batches before."""
    for name, value in sums.items():
        value = value.detach() if isinstance(value, Tensor) else value
        totals[name] = totals.get(name, 0.0) + float(value)
