"""The waits that other tests rest on, and that a busy machine fails none."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until


class Maker:
    """Ends between the question whether it is done and the one whether it lives."""

    def __init__(self, *, ends_done: bool) -> None:
        self.ends_done, self.is_done = ends_done, False

    def is_alive(self) -> bool:
        self.is_done = self.ends_done
        return False


def test_what_came_to_be_just_before_its_maker_ended_is_no_failure() -> None:
    maker = Maker(ends_done=True)
    wait_until(lambda: maker.is_done, alive=maker.is_alive)


def test_a_maker_that_ended_without_it_fails_with_what_it_said() -> None:
    maker = Maker(ends_done=False)
    with pytest.raises(AssertionError, match="its last words"):
        wait_until(lambda: maker.is_done, alive=maker.is_alive, told=lambda: "its last words")


@given(st.just(0.25))
def test_an_example_may_take_as_long_as_the_machine_does(seconds: float) -> None:
    time.sleep(seconds)
