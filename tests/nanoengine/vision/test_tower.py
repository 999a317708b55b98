"""The vision tower: equal to transformers' in values and fp64 gradients; the order of patches, the
interpolation and the rope by hand; a picture's rows do not depend on its neighbours."""

import random

import pytest
import torch
from native_cases import threads
from transformers.models.qwen3_vl import modeling_qwen3_vl
from vision_cases import (
    SEEDS,
    draw_grids,
    draw_pixels,
    draw_vision_fields,
    our_tower,
    run_ours,
    run_theirs,
    their_tower,
)

from nanoengine.model.rope_tables import plain_frequencies
from nanoengine.vision.tower import Tower, interpolation_taps, patch_places, rope_rows
from nanoengine.vision.towers import read_vision_config, write_vision_config

GRID = (1, 4, 6)
ORDER = [
    *[(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (0, 4), (0, 5), (1, 4)],
    *[(1, 5), (2, 0), (2, 1), (3, 0), (3, 1), (2, 2), (2, 3), (3, 2), (3, 3), (2, 4), (2, 5)],
    *[(3, 4), (3, 5)],
]
"""Row and column of each patch of a picture of 4 x 6, merged 2 x 2."""


# -- by hand ---------------------------------------------------------------------------------------


def test_patches_come_square_by_square():
    rows, columns = patch_places(GRID, 2)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == ORDER


def test_interpolation_meets_the_corners_of_the_table_and_is_linear_between():
    """A table of 3 x 3 that holds 10 * row + column: stretched over 4 x 6 patches a step down is
    2/3 of a row of it, a step to the right 2/5 of a column."""
    taps, weights = interpolation_taps(GRID, 2, 3)
    table = torch.tensor([0.0, 1, 2, 10, 11, 12, 20, 21, 22])
    found = (table[taps] * weights).sum(1)
    expected = torch.tensor([10 * row * 2 / 3 + column * 2 / 5 for row, column in ORDER])
    assert torch.allclose(found, expected, atol=1e-5)
    assert found[0] == 0.0 and found[-1] == 22.0
    # the middle of the table alone: how near a patch lies to it, by rows and by columns
    by_row, by_column = (0.0, 2 / 3, 2 / 3, 0.0), (0.0, 0.4, 0.8, 0.8, 0.4, 0.0)
    middle = torch.zeros(9).index_fill_(0, torch.tensor([4]), 1.0)
    expected = torch.tensor([by_row[row] * by_column[column] for row, column in ORDER])
    assert torch.allclose((middle[taps] * weights).sum(1), expected, atol=1e-6)
    assert weights.dtype == torch.float32


def test_one_row_of_patches_takes_the_first_of_the_table():
    taps, weights = interpolation_taps((1, 1, 2), 1, 4)
    assert taps[:, 0].tolist() == [0, 3] and weights[:, 0].tolist() == [1.0, 1.0]


def test_the_rope_turns_by_the_row_first_and_then_by_the_column():
    """Heads of 8: two frequencies for each, 1 and 1/100."""
    frequencies = plain_frequencies(10000.0, 4)
    assert torch.allclose(frequencies, torch.tensor([1.0, 0.01]))
    expected = torch.tensor([[row, row / 100, column, column / 100] for row, column in ORDER])
    assert torch.allclose(rope_rows(GRID, 2, frequencies), expected)


# -- transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("cpu_path")
def test_features_are_those_of_transformers(seed):
    fields = draw_vision_fields(seed)
    theirs = their_tower(fields, seed=seed)
    tower = our_tower(theirs, fields, torch.float32)
    for draw in range(3):
        grids = draw_grids(10 * seed + draw, fields["spatial_merge_size"])
        pixels = draw_pixels(tower.config, grids, draw)
        with torch.no_grad():
            wanted, found = run_theirs(theirs, pixels, grids), run_ours(tower, pixels, grids)
        assert len(found) == 1 + len(fields["deepstack_visual_indexes"])
        for ours, their in zip(found, wanted, strict=True):
            assert ours.shape == their.shape
            assert (ours - their).abs().max() <= 1e-5 * their.abs().max().clamp(min=1)


def wide_rope(q, k, cos, sin):
    """transformers' rotation, without its cast to fp32."""
    cos, sin = cos.unsqueeze(-2).double(), sin.unsqueeze(-2).double()
    half = modeling_qwen3_vl.rotate_half
    return q * cos + half(q) * sin, k * cos + half(k) * sin


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_are_those_of_transformers_in_fp64(seed, checkpoints, monkeypatch):
    monkeypatch.setattr(modeling_qwen3_vl, "apply_rotary_pos_emb_vision", wide_rope)
    fields = draw_vision_fields(seed)
    theirs = their_tower(fields, "sdpa", seed).double()
    tower = our_tower(theirs, fields, torch.float64)
    grids = draw_grids(seed, fields["spatial_merge_size"])
    pixels = draw_pixels(tower.config, grids).double().requires_grad_()
    their_pixels = pixels.detach().clone().requires_grad_()
    wanted = run_theirs(theirs, their_pixels, grids)
    out = tower(pixels, grids, activation_checkpointing=checkpoints)
    found = [out.features_TE, *out.deep]
    slopes = [torch.randn(one.shape, dtype=torch.float64) for one in wanted]
    torch.autograd.backward(wanted, slopes)
    torch.autograd.backward(found, slopes)
    for name, parameter in theirs.named_parameters():
        ours = dict(our_gradients(tower))[f"model.visual.{name}"]
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        assert (ours - parameter.grad).abs().max() <= 1e-10 * parameter.grad.abs().max(), name
    scale = their_pixels.grad.abs().max()
    assert (pixels.grad - their_pixels.grad).abs().max() <= 1e-10 * scale


def our_gradients(tower: Tower):
    """By transformers' names."""
    from nanoengine.vision.tower_names import tower_views

    shapes = {name: view.shape for name, view in tower_views(tower).items()}
    for (name, shape), parameter in zip(shapes.items(), tower.parameters(), strict=True):
        assert parameter.grad is not None, name
        yield name, parameter.grad.view(shape)


# -- company ---------------------------------------------------------------------------------------

PICTURES = [(1, 2, 2), (1, 4, 6), (1, 6, 4), (1, 2, 8), (1, 4, 6), (1, 10, 14)]


def case(dtype, seed=1):
    fields = draw_vision_fields(seed) | {
        "spatial_merge_size": 2,
        "depth": 3,
        "deepstack_visual_indexes": [0, 2],
    }
    tower = our_tower(their_tower(fields), fields, dtype)
    pixels = [draw_pixels(tower.config, [grid], i) for i, grid in enumerate(PICTURES)]
    return tower, pixels


def rows_of(found, grids):
    """The rows of each picture, of features and DeepStack alike."""
    sizes = [rows * columns // 4 for _, rows, columns in grids]
    return [torch.stack(parts) for parts in zip(*(x.split(sizes) for x in found), strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.usefixtures("cpu_path")
def test_a_pictures_rows_do_not_depend_on_its_neighbours(dtype, num_threads):
    tower, pixels = case(dtype)
    with torch.no_grad(), threads(num_threads):
        alone = [
            rows_of(run_ours(tower, x, [grid]), [grid])[0]
            for x, grid in zip(pixels, PICTURES, strict=True)
        ]
        rng = random.Random(0)
        for _ in range(6):
            order = rng.sample(range(len(PICTURES)), rng.randint(2, len(PICTURES)))
            grids = [PICTURES[i] for i in order]
            packed = run_ours(tower, torch.cat([pixels[i] for i in order]), grids)
            for i, rows in zip(order, rows_of(packed, grids), strict=True):
                assert torch.equal(rows, alone[i]), (order, i)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_changes_no_bit_of_a_gradient(dtype):
    tower, pixels = case(dtype)
    grads = []
    for checkpoints in (False, True):
        out = tower(torch.cat(pixels), PICTURES, activation_checkpointing=checkpoints)
        sum(one.float().square().sum() for one in (out.features_TE, *out.deep)).backward()
        grads.append([one.grad.clone() for one in tower.parameters()])
        tower.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_picture_twice_gives_twice_the_gradient_of_one():
    tower, pixels = case(torch.float64)
    grads = []
    for times in (1, 2):
        out = tower(torch.cat([pixels[1].double()] * times), [PICTURES[1]] * times)
        torch.cat([out.features_TE, *out.deep]).square().sum().backward()
        grads.append([one.grad.clone() for one in tower.parameters()])
        tower.zero_grad()
    for once, twice in zip(*grads, strict=True):
        assert torch.allclose(2 * once, twice, rtol=1e-10, atol=1e-12)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patches", "grids", "message"),
    [
        (24, [(1, 4, 4)], "24 patches, and the grids have 16"),
        (12, [(1, 3, 4)], "multiples of 2"),
        (32, [(2, 4, 4)], "videos are left out"),
        (16, [], "grids: empty"),
    ],
)
def test_grids_that_do_not_fit_are_refused(patches, grids, message):
    tower, _ = case(torch.float32)
    with pytest.raises(ValueError, match=message):
        tower(torch.zeros(patches, tower.config.patch_width), grids)


def test_pixels_of_another_width_are_refused():
    tower, _ = case(torch.float32)
    with pytest.raises(ValueError, match="pixels: shape"):
        tower(torch.zeros(24, tower.config.patch_width + 1), [GRID])


# -- vision_config ---------------------------------------------------------------------------------


def test_a_vision_config_is_read_back_as_it_was_written():
    for seed in range(200):
        config = read_vision_config("qwen3_vl", draw_vision_fields(seed))
        assert read_vision_config("qwen3_vl", write_vision_config(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_size": 112}, "window_size: not known here"),
        ({"hidden_act": "silu"}, "hidden_act='silu': not supported"),
        ({"model_type": "qwen2_5_vl"}, "model_type='qwen2_5_vl'"),
        ({"depth": None}, "depth: missing"),
        ({"depth": 0}, "depth=0: must be an integer of at least 1"),
        ({"patch_size": [16, 16]}, "patch_size"),
        ({"num_position_embeddings": 10}, "must be a square"),
        ({"hidden_size": 12, "num_heads": 2}, "multiple of 4"),
        ({"deepstack_visual_indexes": [1, 0]}, "must be ascending"),
        ({"deepstack_visual_indexes": [99]}, "must be ascending indices"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_parameters": {"factor": 2.0}}, "factor: not known here"),
    ],
)
def test_a_vision_config_that_says_something_else_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        read_vision_config("qwen3_vl", draw_vision_fields(0) | change)
