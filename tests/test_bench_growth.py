"""bench_growth.py: bounds by hand, the shape that the scheduler must have, the picture."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_growth
from roofline import BODY, HEAD, PAIR_FLOPS

ONLY_FLOPS = {"flops": 1e9, "bytes": 1e18}


def test_a_step_is_chosen_as_fast_beside_ten_thousand_requests_as_beside_ten() -> None:
    """A queue that is copied at every admission takes four times as long; three leaves room for a
    busy machine."""
    assert min(bench_growth.step_seconds(10_000) for _ in range(2)) < 3 * bench_growth.step_seconds(
        10
    )


def test_the_bound_of_a_batch_is_its_operations_at_the_given_rate() -> None:
    # 63 prompt tokens are forwarded without the head; the 64th and 31 sampled ones with it
    pairs = 95 * 96 / 2
    flops = 2 * (2.0 * BODY * 95 + 2.0 * HEAD * 32 + PAIR_FLOPS * pairs)
    found = bench_growth.bound_of("batch-2", "bf16", ONLY_FLOPS)
    assert found == pytest.approx(2 * 32 / (flops / 1e9))


def test_the_bound_of_a_long_context_is_of_the_tokens_after_it() -> None:
    pairs = sum(range(1000, 1032))
    flops = 2 * (32 * 2.0 * (BODY + HEAD) + PAIR_FLOPS * pairs)
    found = bench_growth.bound_of("context-1000", "bf16", ONLY_FLOPS)
    assert found == pytest.approx(2 * 32 / (flops / 1e9), rel=1e-6)


def row(name: str, value: float, bound: float | None) -> dict[str, Any]:
    return {"name": name, "value": value, "bound": bound, "dtype": "bf16", "threads": 1}


def test_the_picture_has_a_curve_for_every_kind_of_row() -> None:
    rows = [row(f"batch-{n}", 40.0 * n, 100.0 * n) for n in (1, 2, 4)]
    rows += [row(f"prefill-{n}", 900.0, 1000.0) for n in (128, 256)]
    rows += [row(f"context-{n}", 90.0, 100.0) for n in (128, 256)]
    rows += [row(f"waiting-{n}", 35.0 + n / 1000, None) for n in (10, 100)]
    measured = {"rows": rows, "hardware": "a <processor>", "date": "2026-11-24"}
    root = ElementTree.fromstring(bench_growth.draw(measured))
    lines = [one for one in root.iter() if one.get("fill") == "none"]
    solid = [one.get("d", "")[1:].split("L") for one in lines if not one.get("stroke-dasharray")]
    assert [len(points) for points in solid] == [3, 2, 2, 2]
    # doubling the batch doubles the rate: a straight line upwards at equal distances
    heights = [float(point.split(" ")[1]) for point in solid[0]]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2) != 0
