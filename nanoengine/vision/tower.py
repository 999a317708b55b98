"""The definition of a vision tower: patches of pictures in, rows for the decoder out.

    tower = Tower(config.vision, torch.bfloat16)
    rows = tower(pixels_PC, grids)      # rows.features_TE, and rows.deep: one [T, E] a merger

Patches of all pictures lie one after the other, those of a picture in the order in which they are
merged: square by square, and row by row in a square. A picture's rows are a function of its own
pixels and of the weights: attention stays within a picture, all else is row by row. So they have
the same bits alone, packed with others and in any order, on a CPU.

Everything that depends on the grids alone, `PictureLayout`, is made once a call.
Left out: how pixels are made; where the rows go, which the caller knows.
Next: towers.py (what sets families apart), layers.py (the decoder's).

Shapes: P patches, C numbers of a patch, D hidden size, H heads, T tokens (P / patches a token),
E the decoder's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import apply_rope, flash_attn_varlen, make_varlen_plan, rms_norm, swiglu
from kernels.linear import InputRecipe
from kernels.vision.gelu import gelu
from kernels.vision.layer_norm import layer_norm
from nanoengine.model.linear import PackedLinear, embed
from nanoengine.model.rope_tables import plain_frequencies
from nanoengine.vision.towers import VisionConfig

Grid = tuple[int, int, int]
"""Frames (1: a still picture), rows and columns of patches."""


Pair = tuple[Tensor, Tensor]


class PictureRows(NamedTuple):
    """The rows that a tower gives for the tokens of its pictures."""

    features_TE: Tensor
    deep: tuple[Tensor, ...]
    """[T, E] each, for the first layers of the decoder; none without DeepStack."""


class Runs:
    """Runs of patches, each of which sees all of its own."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        bounds = [0, *accumulate(sizes)]
        self.bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
        self.longest = max(sizes)
        self.plan = make_varlen_plan(bounds) if device.type == "cpu" else None


@dataclass(frozen=True)
class PictureLayout:
    """All that the grids of some pictures say about their patches."""

    taps: Pair | None
    """Rows of the table of positions that a patch lies between, [P, N], and their weights in fp32,
    where there is a table."""
    rope: Pair | None
    """cos and sin [P, A], half a head wide: frequencies by the row, then by the column."""
    pictures: Runs
    windows: Runs | None
    order_T: Tensor | None
    """The tokens window by window, where there are windows: patches are looked at in that order,
    and all else here is in it."""


class GridLayout(NamedTuple):
    """Holds what one picture's grid says, each as of `PictureLayout`."""

    taps: Pair | None
    rope: Pair | None
    order_T: Tensor | None
    windows: list[int]
    """Patches of each."""


def patch_places(grid: Grid, merge: int) -> tuple[Tensor, Tensor]:
    """The row and the column of each patch of a picture, [P] each, in the order of its patches:
    squares of merge x merge row by row, and row by row in a square."""
    _, height, width = grid
    rows = torch.arange(height).view(-1, 1).expand(height, width)
    columns = torch.arange(width).expand(height, width)
    squares = (height // merge, merge, width // merge, merge)
    by_row, by_column = (x.reshape(squares).transpose(1, 2).flatten() for x in (rows, columns))
    return by_row, by_column


def _axis_taps(index_P: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """The two rows of a table of `side` between which each index of an axis of `size` lies, and
    their weights in fp32, [P, 2] each; the ends of the axis are those of the table."""
    # by a tensor: to divide by a number may be to multiply by its reciprocal
    source = index_P.float() * (side - 1) / torch.tensor(float(max(size - 1, 1)))
    low = source.floor()
    taps = low.long().unsqueeze(1) + torch.arange(2)
    weights = (1 - (source.unsqueeze(1) - taps).abs()).clamp(min=0)
    return taps.clamp(0, side - 1), weights


def interpolation_taps(grid: Grid, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """The four rows of a square table of `side` that a bilinear interpolation takes for each patch,
    and their weights in fp32, [P, 4] each."""
    rows, columns = patch_places(grid, merge)
    row_taps, row_weights = _axis_taps(rows, grid[1], side)
    column_taps, column_weights = _axis_taps(columns, grid[2], side)
    taps = row_taps.unsqueeze(2) * side + column_taps.unsqueeze(1)
    weights = row_weights.unsqueeze(2) * column_weights.unsqueeze(1)
    return taps.flatten(1), weights.flatten(1)


def _axis_bucket(index_P: Tensor, size: int, side: int) -> Tensor:
    """The row of a table of `side` on which each index of an axis of `size` falls: by its fraction
    of the axis, in fp32, among fractions of the table."""
    # step by step as transformers has it: elsewhere another rounding would take the neighbour
    steps = torch.arange(1 / side, 1.0, 1 / side)
    fractions = index_P.float() * (1.0 / torch.tensor(size))
    return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), steps, right=True)


def bucket_taps(grid: Grid, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """The row of a square table of `side` that each patch takes, and its weight, 1: [P, 1] each."""
    rows, columns = patch_places(grid, merge)
    taps = _axis_bucket(rows, grid[1], side) * side + _axis_bucket(columns, grid[2], side)
    return taps.unsqueeze(1), torch.ones(len(taps), 1)


def in_order(x_PC: Tensor, order_T: Tensor | None) -> Tensor:
    """Patches, the squares of some tokens one after the other, in another order of these."""
    if order_T is None:
        return x_PC
    return x_PC.unflatten(0, (len(order_T), -1)).index_select(0, order_T).flatten(0, 1)


def _joined(pairs: Sequence[Pair | None], device: torch.device) -> Pair | None:
    """The tensors of several pictures, one picture after the other; None, where they have none."""
    found = [pair for pair in pairs if pair is not None]
    if not found:
        return None
    first, second = (torch.cat(parts).to(device) for parts in zip(*found, strict=True))
    return first, second


def rope_rows(grid: Grid, merge: int, frequencies: Tensor) -> Tensor:
    """The angles of each patch, [P, 2 · frequencies] in fp32: by its row, then by its column."""
    places = patch_places(grid, merge)
    return torch.cat([place.float().unsqueeze(1) * frequencies for place in places], 1)


def window_order(grid: Grid, merge: int, window: int) -> tuple[Tensor, list[int]]:
    """The tokens of a picture, [T], window by window of `window` times `window` of them and row by
    row in a window, and how many are in each: at the ends of rows and columns fewer."""
    index = torch.arange(grid[1] * grid[2] // merge**2).view(grid[1] // merge, -1)
    cut = [part for rows in index.split(window) for part in rows.split(window, dim=1)]
    return torch.cat([part.flatten() for part in cut]), [part.numel() for part in cut]


class LayerNorm(nn.Module):
    """A norm with a bias, (x − mean) / deviation · weight + bias."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def recipe(self, x: Tensor) -> InputRecipe:
        """The backward pass makes the norm again by it, so that it need not be kept."""
        return InputRecipe(partial(layer_norm, eps=self.eps), (x, self.weight, self.bias))


class ScaleNorm(nn.Module):
    """RMSNorm, x / root of its mean square · weight."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def recipe(self, x: Tensor) -> InputRecipe:
        """As of `LayerNorm`."""
        return InputRecipe(partial(rms_norm, eps=self.eps), (x, self.weight))


_NORMS: dict[str, type[LayerNorm | ScaleNorm]] = {"layer_norm": LayerNorm, "rms_norm": ScaleNorm}
_TAPS = {"stretched": interpolation_taps, "bucketed": bucket_taps}
_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "gelu_pytorch_tanh": (partial(gelu, approximate="tanh"), 1),
    "silu": (swiglu, 2),
}
"""And the matrices that make what they take: one, or a gate and what it lets through."""


class TowerBlock(nn.Module):
    """Attention over a picture and an MLP, each after a norm of the residual stream."""

    def __init__(self, config: VisionConfig, index: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        norm, eps = _NORMS[config.tower.norm], config.norm_eps
        width = config.hidden_size
        self.head_dim = config.head_dim
        self.is_windowed = config.tower.has_windows and index not in config.fullatt_block_indexes
        self.activate, num_up = _ACTIVATIONS[config.tower.activation]
        self.attention_norm = norm(width, eps, dtype, device)
        self.qkv = PackedLinear(width, 3 * width, True, dtype, device)
        self.out = PackedLinear(width, width, True, dtype, device)
        self.mlp_norm = norm(width, eps, dtype, device)
        self.up = PackedLinear(width, num_up * config.intermediate_size, True, dtype, device)
        self.down = PackedLinear(config.intermediate_size, width, True, dtype, device)

    def forward(self, x_PD: Tensor, layout: PictureLayout) -> Tensor:
        x_PD = x_PD + self._attend(x_PD, layout)
        up = self.up(self.mlp_norm(x_PD), self.mlp_norm.recipe(x_PD))
        # the activation is cheaper to compute twice than to keep: it is the widest tensor here
        return x_PD + self.down(self.activate(up), InputRecipe(self.activate, (up,)))

    def _attend(self, x_PD: Tensor, layout: PictureLayout) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_PD), self.attention_norm.recipe(x_PD))
        shape = (len(x_PD), -1, self.head_dim)
        q_PHD, k_PHD, v_PHD = (part.view(shape) for part in qkv.chunk(3, -1))
        if layout.rope is not None:
            q_PHD, k_PHD = apply_rope(q_PHD, k_PHD, *layout.rope, None)
        runs = layout.windows if self.is_windowed else layout.pictures
        assert runs is not None, "a tower with windows lays them out"
        limits = (runs.bounds, runs.bounds, runs.longest, runs.longest)
        o_PHD = flash_attn_varlen(q_PHD, k_PHD, v_PHD, *limits, causal=False, plan=runs.plan)
        out: Tensor = self.out(cast(Tensor, o_PHD).reshape(len(x_PD), -1))
        return out


class PatchMerger(nn.Module):
    """Squares of patches to tokens: a norm, and two matrices with a GELU between them."""

    def __init__(
        self, config: VisionConfig, dtype: torch.dtype, device: str, *, norms_merged: bool
    ) -> None:
        """`norms_merged`: the norm is of whole tokens, where else it is of each patch."""
        super().__init__()
        self.width = config.patches_per_token * config.hidden_size
        self.norms_merged = norms_merged
        width = self.width if norms_merged else config.hidden_size
        self.norm = _NORMS[config.tower.norm](width, config.norm_eps, dtype, device)
        self.hidden = PackedLinear(self.width, self.width, True, dtype, device)
        self.project = PackedLinear(self.width, config.out_hidden_size, True, dtype, device)

    def forward(self, x_PD: Tensor) -> Tensor:
        """[T, E]."""
        if self.norms_merged:
            x_PD = x_PD.view(-1, self.width)
        # the exact GELU here, by erf; the blocks have the one by tanh
        hidden = self.hidden(self.norm(x_PD).view(-1, self.width))
        out: Tensor = self.project(gelu(hidden), InputRecipe(gelu, (hidden,)))
        return out


class PatchProjection(nn.Module):
    """Squares of patches to tokens: one matrix without a bias."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.width = config.patches_per_token * config.hidden_size
        self.project = PackedLinear(self.width, config.out_hidden_size, False, dtype, device)

    def forward(self, x_PD: Tensor) -> Tensor:
        """[T, E]."""
        out: Tensor = self.project(x_PD.view(-1, self.width))
        return out


class Positions(nn.Module):
    """The learned table of positions, laid over pictures."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))

    def forward(self, taps_PN: Tensor, weights_PN: Tensor) -> Tensor:
        """[P, D], summed in fp32 and rounded once."""
        rows = embed(taps_PN.flatten(), self.weight).view(*taps_PN.shape, -1)
        total = rows[:, 0] * weights_PN[:, 0:1]
        for tap in range(1, rows.shape[1]):  # in order: a sum over a dimension may be in parts
            total = total + rows[:, tap] * weights_PN[:, tap : tap + 1]
        return total.to(self.weight.dtype)


class Tower(nn.Module):
    """A vision tower of any family. Matrices start as zeros: a folder fills them, or
    `init_weights` of the model that it belongs to; then its `repack` lays out copies for
    products."""

    def __init__(
        self, config: VisionConfig, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patches = PackedLinear(
            config.patch_width, width, config.tower.patch_bias, dtype, device
        )
        self.positions: Positions | None = None
        if config.tower.positions != "none":
            self.positions = Positions((config.table_side**2, width), dtype, device)
        self.blocks = nn.ModuleList(
            TowerBlock(config, index, dtype, device) for index in range(config.depth)
        )
        self.last_norm: nn.Module | None = None
        if config.tower.has_last_norm:
            self.last_norm = _NORMS[config.tower.norm](width, config.norm_eps, dtype, device)
        self.merger: nn.Module
        if config.tower.merger == "mlp":
            self.merger = PatchMerger(config, dtype, device, norms_merged=False)
        else:
            self.merger = PatchProjection(config, dtype, device)
        self.deep_mergers = nn.ModuleList(
            PatchMerger(config, dtype, device, norms_merged=True)
            for _ in config.deepstack_visual_indexes
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.patches.weight.dtype

    def layout(self, grids: Sequence[Grid]) -> PictureLayout:
        """The places of the patches of pictures with these grids."""
        config, device = self.config, self.patches.weight.device
        # once a size, which most pictures of a batch share; and a function of the size alone
        made = {grid: self._of_grid(grid) for grid in set(grids)}
        each = [made[grid] for grid in grids]
        taps = _joined([one.taps for one in each], device)
        rope = _joined([one.rope for one in each], device)
        if rope is not None:
            wide = torch.promote_types(self.dtype, torch.float32)
            rope = (rope[0].to(wide), rope[1].to(wide))
        sizes = [height * width for _, height, width in grids]
        windows: Runs | None = None
        order_T: Tensor | None = None
        if config.tower.has_windows:
            windows = Runs([size for one in each for size in one.windows], device)
            starts = accumulate((size // config.patches_per_token for size in sizes), initial=0)
            orders = (one.order_T for one in each if one.order_T is not None)
            moved = [one + start for one, start in zip(orders, starts, strict=False)]
            order_T = torch.cat(moved).to(device)
        return PictureLayout(taps, rope, Runs(sizes, device), windows, order_T)

    def _of_grid(self, grid: Grid) -> GridLayout:
        config, merge = self.config, self.config.spatial_merge_size
        taps: Pair | None = None
        rope: Pair | None = None
        order_T: Tensor | None = None
        windows: list[int] = []
        if config.tower.positions != "none":
            taps = _TAPS[config.tower.positions](grid, merge, config.table_side)
        if config.window_tokens is not None:
            order_T, sizes = window_order(grid, merge, config.window_tokens)
            windows = [size * config.patches_per_token for size in sizes]
        if config.tower.has_rope:
            frequencies = plain_frequencies(config.rope_theta, config.head_dim // 2)
            angles = in_order(rope_rows(grid, merge, frequencies), order_T)
            rope = (angles.cos(), angles.sin())
        return GridLayout(taps, rope, order_T, windows)

    def forward(
        self,
        pixels_PC: Tensor,
        grids: Sequence[Grid],
        *,
        activation_checkpointing: bool = False,
    ) -> PictureRows:
        """The rows of some pictures, one after the other. `pixels` are normalised patches in any
        float dtype, each (channel, frame, row, column); `grids` has one entry a picture.

        `activation_checkpointing` keeps each block's input alone for the backward pass: the same
        gradients bit for bit, about a third more work. `ValueError` where pixels and grids do not
        fit each other."""
        self._check(pixels_PC, grids)
        layout = self.layout(grids)
        x_PD = self.patches(in_order(pixels_PC.to(self.dtype), layout.order_T))
        if self.positions is not None and layout.taps is not None:
            x_PD = x_PD + self.positions(*layout.taps)
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        recomputes = activation_checkpointing and torch.is_grad_enabled()
        deep = []
        mergers: Iterator[nn.Module] = iter(self.deep_mergers)
        for index, block in enumerate(self.blocks):
            x_PD = again(block, x_PD, layout) if recomputes else block(x_PD, layout)
            if index in self.config.deepstack_visual_indexes:
                deep.append(next(mergers)(x_PD))
        if self.last_norm is not None:
            x_PD = self.last_norm(x_PD)
        features_TE = self.merger(x_PD)
        if layout.order_T is not None:
            features_TE = features_TE.index_select(0, layout.order_T.argsort())
        return PictureRows(features_TE, tuple(deep))

    def _check(self, pixels_PC: Tensor, grids: Sequence[Grid]) -> None:
        width = self.config.patch_width
        if pixels_PC.dim() != 2 or pixels_PC.shape[1] != width:
            raise ValueError(
                f"pixels: shape {tuple(pixels_PC.shape)} must be [patches, {width}]: channels, "
                "frames, rows and columns of a patch"
            )
        if not grids:
            raise ValueError("grids: empty; a tower is asked about at least one picture")
        for grid in grids:
            _check_grid(grid, self.config.spatial_merge_size)
        num_patches = sum(rows * columns for _, rows, columns in grids)
        if num_patches != len(pixels_PC):
            raise ValueError(
                f"pixels: {len(pixels_PC)} patches, and the grids have {num_patches}; give the "
                "patches of all pictures, one picture after the other"
            )


def _check_grid(grid: Grid, merge: int) -> None:
    if len(grid) != 3 or grid[0] != 1 or any(size < 1 or size % merge for size in grid[1:]):
        raise ValueError(
            f"grid={tuple(grid)}: must be (1, rows, columns) of patches, both multiples of "
            f"{merge}: patches are merged {merge} x {merge}, and videos are left out"
        )
