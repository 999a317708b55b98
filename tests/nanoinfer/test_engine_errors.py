"""Bad requests are refused with the value named; a step that fails leaves the engine intact."""

import math
import signal

import numpy as np
import pytest
from cache_oracle import CacheRunner, make_engine, replay, run_all

from nanoinfer.batch import RunnerOutput, StepInput
from nanoinfer.params import SamplingParams


class Flaky(CacheRunner):
    """Fails every other step, before anything is written."""

    num_runs = 0

    def run(self, step: StepInput) -> RunnerOutput:
        self.num_runs += 1
        if self.num_runs % 2:
            raise MemoryError("no memory for the step")
        return super().run(step)


def test_requests_survive_failed_steps_with_the_same_tokens() -> None:
    engine, _ = make_engine(num_blocks=64, block_size=4, max_num_seqs=6, max_batch_tokens=16)
    engine._runner = Flaky(64, 4)  # type: ignore[assignment]
    prompt = [i % 7 for i in range(22)]  # ends inside a block, so the others copy one
    handles = [engine.add(prompt + [i] * (i % 3), SamplingParams(max_tokens=9)) for i in range(6)]
    outputs, num_failed = {}, 0
    while engine.num_unfinished:
        try:
            outputs.update(engine.step())
        except MemoryError:
            num_failed += 1
        engine.check()
    assert num_failed > 5
    for i, handle in enumerate(handles):
        assert outputs[handle].ids == replay(prompt + [i] * (i % 3), [0] * 9)
    assert engine._blocks.num_free == 64


class Interrupted(CacheRunner):
    """Ctrl-C in one step."""

    num_runs = 0

    def __init__(self, num_blocks: int, block_size: int, at: int) -> None:
        super().__init__(num_blocks, block_size)
        self.at = at

    def run(self, step: StepInput) -> RunnerOutput:
        self.num_runs += 1
        if self.num_runs == self.at:
            # a background job's Python ignores the signal
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.signal(signal.SIGINT, before)
        return super().run(step)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_ctrl_c_in_generate_leaves_none_of_its_requests_and_all_others(at: int) -> None:
    engine, _ = make_engine(num_blocks=64, block_size=4, max_num_seqs=6, max_batch_tokens=16)
    engine._runner = Interrupted(64, 4, at)  # type: ignore[assignment]
    short = engine.add([3, 3], SamplingParams(max_tokens=2), priority=-1)
    other = engine.add([1, 2], SamplingParams(max_tokens=9))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3] * 4, [4]], SamplingParams(max_tokens=20, n=2))
    engine.check()
    assert engine.num_unfinished == 2 - (at == 5) and engine.metrics()["num_aborted"] == 4
    outputs = run_all(engine)
    assert outputs.keys() == {short, other}  # also what ended in a step of `generate`
    assert outputs[other].ids == replay([1, 2], [0] * 9)
    assert outputs[short].ids == replay([3, 3], [0] * 2)
    assert engine._blocks.num_free == 64
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].ids == replay(
        [1, 2, 3], [0] * 3
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -0.1}, r"temperature=-0\.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 1e-40}, "temperature=1e-40"),
        ({"temperature": 1e300}, r"temperature=1e\+300"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 10**30}, "top_k=1000000000000000000000000000000"),
        ({"top_k": 2.5}, r"top_k=2\.5: must be an integer"),
        ({"seed": 1.5}, r"seed=1\.5: must be an integer"),
        ({"top_logps": 2.0}, r"top_logps=2\.0: must be an integer"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty=1e-40"),
        ({"presence_penalty": -1e38}, r"presence_penalty=-1e\+38"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
    ],
)
def test_impossible_sampling_parameters_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("ids", "max_tokens", "message"),
    [
        ([], 1, "empty prompt"),
        ([1, 7], 1, "token 7 is outside the vocabulary of 7"),
        ([1, 2.5], 1, "ids: must be integers"),
        (["1"], 1, "ids: must be integers"),
        ([-1, 2], 1, "token -1 is outside"),
        ([1] * 200, 57, "256 positions"),
        ([1] * 30, 3, "needs 9 cache blocks"),
    ],
)
def test_impossible_requests_are_refused_and_others_go_on(
    ids: list[int], max_tokens: int, message: str
) -> None:
    engine, _ = make_engine(num_blocks=8, block_size=4, max_num_seqs=4)
    good = engine.add([1, 2], SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match=message):
        engine.add(ids, SamplingParams(max_tokens=max_tokens))
    with pytest.raises(ValueError, match=message):
        engine.generate([ids, [1]], SamplingParams(max_tokens=max_tokens))
    assert engine.num_unfinished == 1
    assert run_all(engine)[good].ids == replay([1, 2], [0] * 4)


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids", "logit_bias"])
def test_ids_among_the_parameters_are_integers(name: str) -> None:
    engine, _ = make_engine(num_blocks=8)
    with pytest.raises(ValueError, match=rf"{name}: token 1\.5 must be an integer"):
        engine.add([1], SamplingParams(**{name: {1.5: 1.0} if name == "logit_bias" else (1.5,)}))


def test_numpy_numbers_are_numbers() -> None:
    """A seed of numpy's is negative or wide like any other, and does not end in its int64."""
    engine, _ = make_engine(num_blocks=8)
    prompt, params = np.array([1, 2]), SamplingParams(max_tokens=2, seed=np.int64(-5), n=2)
    assert params.members()[1].seed == SamplingParams(seed=-5, n=2).members()[1].seed
    assert engine.generate([prompt], params)[0].ids == replay([1, 2], [0] * 2)


def test_parameters_must_be_one_or_one_each() -> None:
    engine, _ = make_engine(num_blocks=8)
    with pytest.raises(ValueError, match="3 for 2 prompts"):
        engine.generate([[1], [2]], [SamplingParams()] * 3)


def test_generating_while_paused_is_an_error_and_not_a_hang() -> None:
    engine, _ = make_engine(num_blocks=8)
    engine.pause()
    with pytest.raises(RuntimeError, match="resume"):
        engine.generate([[1]], SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"cache_bytes": 10}, "cache_bytes=10"),
        ({"max_num_seqs": -1}, "max_num_seqs=-1"),
        ({"num_blocks": 4, "block_size": 0}, "block_size=0"),
    ],
)
def test_impossible_sizes_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(**options)


def test_a_stop_token_ends_a_request_and_is_its_last() -> None:
    engine, _ = make_engine(num_blocks=32, block_size=4)
    free = replay([1, 2, 3], [0] * 30)
    stop = free[5]
    first = free.index(stop)
    params = SamplingParams(max_tokens=30, stop_token_ids=(stop,))
    output = engine.generate([[1, 2, 3]], params)[0]
    assert output.ids == free[: first + 1]
    assert output.finish_reason == "stop"
