"""What a leader tells its followers arrives as it was, and nothing else is taken for it."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoinfer.params import Grammar, Output, SamplingParams
from nanoinfer.variants.led_messages import (
    AbortCall,
    AddCall,
    LeaderHeartbeat,
    LeaderShutdown,
    LedMessage,
    PlainCall,
    TensorHeader,
    TensorsEnd,
    WeightsCall,
    decode,
    encode,
)

PARAMS = SamplingParams(
    max_tokens=7,
    temperature=0.1 + 0.2,
    top_k=3,
    top_p=1 / 3,
    logit_bias={5: -1e-300, 7: 2.0, 0: 5e-324},
    stop=("é\n", "\ud800"),
    stop_token_ids=(1, 2),
    grammar=Grammar("choice", choices=("yes", "no")),
    seed=2**64 - 1,
    adapter="a/b",
)
SAMPLED = Output(
    ids=[3, 4],
    logps=[-0.1, -math.inf],
    versions=[0, 9],
    finish_reason="abort",
    sampled_logps=[-1e-17, math.pi],
    stop_reason="é",
    text="x",
    top_logps=[[(1, -0.5), (2, -0.25)], []],
    prompt_logps=[-0.3],
    prompt_top_logps=[[(1, -0.75)]],
)
MESSAGES = [
    AddCall([1, 2, 3], PARAMS, -4, SAMPLED),
    AddCall([0] * 5000, SamplingParams(allowed_token_ids=(1, 2))),
    AddCall([1], SamplingParams(grammar=Grammar("regex", r"\d+"))),
    AbortCall(2**70),
    *(PlainCall(name) for name in ("step", "pause", "resume", "sleep", "wake")),
    WeightsCall(3),
    *(TensorHeader("a.b", (4, 0, 3), dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)),
    TensorHeader("scalar", (), torch.float32),
    TensorsEnd(),
    TensorsEnd("ValueError: \n 'x'"),
    LeaderHeartbeat(),
    LeaderShutdown(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_arrives_as_it_was(message: LedMessage) -> None:
    found = decode(encode(message))
    assert type(found) is type(message) and found == message


def test_every_float_arrives_to_the_bit() -> None:
    draw = random.Random(3)
    logps = [struct.unpack("d", draw.randbytes(8))[0] for _ in range(5000)]
    logps += [0.0, -0.0, math.inf, -math.inf, 5e-324, float(np.float32(0.1))]
    call = AddCall([1], SamplingParams(), 0, Output(logps=logps, sampled_logps=logps))
    found = decode(encode(call))
    assert isinstance(found, AddCall) and found.sampled is not None
    for column in (found.sampled.logps, found.sampled.sampled_logps):
        assert [struct.pack("d", x) for x in column if x == x] == [
            struct.pack("d", x) for x in logps if x == x
        ]
        assert [x != x for x in column] == [x != x for x in logps]


def test_numbers_of_numpy_become_the_same_numbers() -> None:
    params = replace(PARAMS, temperature=np.float32(0.7), logit_bias={np.int64(3): np.float64(0.1)})
    call = decode(encode(AddCall([1], params)))  # type: ignore[arg-type]
    assert isinstance(call, AddCall)
    assert call.params.temperature == float(np.float32(0.7))
    assert call.params.logit_bias == {3: 0.1}


class _Runs:
    """As a pickle it makes a folder where it is read."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


def test_a_pickle_is_no_message_and_runs_nothing(tmp_path: Path) -> None:
    for protocol in range(6):
        with pytest.raises(ValueError):
            decode(pickle.dumps(_Runs(tmp_path / "made"), protocol))
    assert not (tmp_path / "made").exists()


def altered(message: LedMessage, change: Any) -> bytes:
    told = json.loads(encode(message))
    change(told)
    return json.dumps(told).encode()


ADD = AddCall([1, 2], PARAMS, 0, SAMPLED)
WRONG = {
    "no JSON": b"\xff",
    "nothing": b"",
    "a number": b"3",
    "an empty list": b"[]",
    "another kind": b'["check_pending"]',
    "another method": b'["PlainCall", "update_weights"]',
    "a private method": b'["PlainCall", "__class__"]',
    "no method": b'["PlainCall"]',
    "a method in a list": b'["PlainCall", ["step"]]',
    "a kind in a list": b'[["PlainCall"], "step"]',
    "too many fields": b'["LeaderHeartbeat", 1]',
    "a text for a handle": b'["AbortCall", "3"]',
    "a float for a version": b'["WeightsCall", 1.5]',
    "a truth for a version": b'["WeightsCall", true]',
    "no dtype": b'["TensorHeader", "x", [1], "load"]',
    "a negative size": b'["TensorHeader", "x", [-1], "float32"]',
    "a text in a shape": b'["TensorHeader", "x", ["1"], "float32"]',
    "a text in ids": altered(ADD, lambda told: told[1].append("3")),
    "a truth in ids": altered(ADD, lambda told: told[1].append(True)),
    "no ids": altered(ADD, lambda told: told.__setitem__(1, None)),
    "an unknown parameter": altered(ADD, lambda told: told[2].update(cache_salt=1)),
    "a missing parameter": altered(ADD, lambda told: told[2].pop("stop")),
    "a temperature that is none": altered(ADD, lambda told: told[2].update(temperature=-1)),
    "a text for a temperature": altered(ADD, lambda told: told[2].update(temperature="1")),
    "a stop that is no text": altered(ADD, lambda told: told[2].update(stop=[3])),
    "a grammar of another kind": altered(ADD, lambda told: told[2]["grammar"].update(kind="x")),
    "a bias of a text": altered(ADD, lambda told: told[2].update(logit_bias=[["3", 1.0]])),
    "an unknown output": altered(ADD, lambda told: told[4].update(tail=1)),
    "an output of texts": altered(ADD, lambda told: told[4].update(logps=["x"])),
}


@pytest.mark.parametrize("raw", WRONG.values(), ids=WRONG)
def test_what_no_leader_says_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        decode(raw)


def test_what_has_no_word_in_json_is_refused_before_it_is_told() -> None:
    with pytest.raises(ValueError, match=r"cannot be told to the other ranks: .* is a set"):
        encode(AddCall([1], replace(PARAMS, adapter={1})))  # type: ignore[arg-type]
