"""What the contract's tests are given: the back ends as parameters, and a declared machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nanosched import Resources, Scheduler

MACHINE = Resources(num_cpus=3, num_gpus=4)

MakeScheduler = Callable[[], Scheduler]

inline = pytest.param("inline")
local = pytest.param("local", marks=pytest.mark.xdist_group("actors"))
ray = pytest.param("ray", marks=pytest.mark.xdist_group("ray"))
