"""Log-probs are of the tempered distribution, or of the model's own for requests that ask; both
against transformers in float64."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Served, serve
from test_sampler import batch
from tiny_models import save_reference
from tiny_text import make_model, make_tokenizer

from nanoengine.formats.hf import load_model
from nanoengine.model.attention import PackedContext, packed_positions
from nanoinfer.batch import StepInput
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.gpu.device_sampler import device_sampling, sample_on_device, top_on_device
from nanoinfer.options.full_sampling import FullSamplingBatch, sample, top_logps
from nanoinfer.params import Output, SamplingParams
from nanoinfer.variants.full_runner import FullRunner, FullStep

PROMPT = [5, 17, 80, 3, 99, 12, 150]
TEMPERATURE = 0.6
TOLERANCE = 2e-5
EDITED = {"logit_bias": {7: 5.0}, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
ASKED = [
    {"temperature": TEMPERATURE},
    {"temperature": TEMPERATURE, "top_k": 5, "top_p": 0.8},
    {"temperature": TEMPERATURE, **EDITED},
    {"temperature": 0.0},
    {"temperature": 0.0, **EDITED},
    {"temperature": 1.0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return save_reference("llama-gqa-tied", folder).double()


def check(reference: Any, prompt: list[int], output: Output, temperature: float) -> None:
    """All log-probs of `output` are those of softmax(logits / temperature) in float64."""
    ids = prompt + output.ids
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0].double()
    logp_TV = torch.log_softmax(logits / temperature, -1)[:-1]
    reported = torch.tensor(output.prompt_logps + output.logps, dtype=torch.float64)
    right = logp_TV.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(reported, right, rtol=0, atol=TOLERANCE)
    tops = output.prompt_top_logps + output.top_logps
    assert len(tops) == len(right)
    for row, logp_V in zip(tops, logp_TV, strict=True):
        assert [token for token, _ in row] == logp_V.topk(3).indices.tolist()
        theirs = torch.tensor([logp for _, logp in row], dtype=torch.float64)
        torch.testing.assert_close(theirs, logp_V.topk(3).values, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("path", ["cpu", "device"])
def test_reported_logps_are_those_of_the_mode_that_each_request_asked_for(
    reference: Any, folder: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side, both modes. The path of a GPU runs here by the definitions of its kernels."""
    if path == "device":
        sent = FullRunner.sent

        def with_drawing(self: FullRunner, step: StepInput) -> FullStep:
            drawing = device_sampling(FullSamplingBatch.of(step.sampling), 211)
            return replace(sent(self, step), drawing=drawing)

        monkeypatch.setattr(FullRunner, "sent", with_drawing)
    engine = LLMEngine(
        load_model(folder), InferConfig(num_blocks=100, max_batch_tokens=20, max_num_seqs=16)
    )
    common = {"max_tokens": 9, "ignore_eos": True, "seed": 3, "top_logps": 3, "prompt_logps": True}
    tempered = [SamplingParams(**common, **options) for options in ASKED]
    raw = [replace(params, logps_mode="raw") for params in tempered]
    outputs = engine.generate([PROMPT] * (2 * len(ASKED)), tempered + raw)
    for params, output in zip(tempered + raw, outputs, strict=True):
        is_raw = params.logps_mode == "raw"
        check(reference, PROMPT, output, 1.0 if is_raw else params.temperature or 1.0)
    for one, other in zip(outputs[: len(ASKED)], outputs[len(ASKED) :], strict=True):
        assert one.ids == other.ids, "the mode changes what is reported, not what is drawn"
        assert one.sampled_logps == other.sampled_logps
    assert outputs[0].logps != outputs[len(ASKED)].logps


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("budget", [64, 10])
def test_each_prompt_has_as_many_likeliest_tokens_as_it_asked_for(
    folder: Path, budget: int
) -> None:
    """In one step with prompts of the same temperature that ask for fewer, for more and for none;
    each says what it says alone."""
    sizes = {"num_blocks": 100, "max_batch_tokens": budget, "max_num_seqs": 10}
    counts = [1, 7, 0, 3, 250, 2]  # of a vocabulary of 211
    asked = [
        SamplingParams(max_tokens=2, seed=i, top_logps=count, prompt_logps=True, temperature=heat)
        for i, (count, heat) in enumerate(zip(counts * 2, [0.6] * 6 + [1.0] * 6, strict=True))
    ]
    prompts = [[token + i for token in PROMPT] for i in range(12)]
    together = LLMEngine(load_model(folder), InferConfig(**sizes)).generate(prompts, asked)
    for count, ids, params, output in zip(counts * 2, prompts, asked, together, strict=True):
        rows = output.prompt_top_logps + output.top_logps
        num_rows = len(ids) - 1 + len(output.ids) if count else 0
        assert [len(row) for row in rows] == [min(count, 211)] * num_rows
        alone = LLMEngine(load_model(folder), InferConfig(**sizes)).generate([ids], params)[0]
        assert rows == alone.prompt_top_logps + alone.top_logps
        for token, logp, row in zip(ids[1:], output.prompt_logps, rows, strict=False):
            assert dict(row).get(token, logp) == logp


def test_a_raw_row_leaves_the_bits_of_its_neighbours() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2)) * 3
    tops = {0: 2, 3: 2, 5: 2}
    plain, mixed = batch(6, 0.7, num_top=tops), batch(6, 0.7, num_top=tops, raw_rows=[3, 4])
    before, after = sample(logits, plain), sample(logits, mixed)
    assert torch.equal(before.tokens, after.tokens)
    assert torch.equal(before.sampled_logps, after.sampled_logps)
    assert torch.equal(before.logps[[0, 1, 2, 5]], after.logps[[0, 1, 2, 5]])
    raw = torch.log_softmax(logits.double(), -1)
    picked = raw[[3, 4], after.tokens[[3, 4]]]
    torch.testing.assert_close(after.logps[[3, 4]].double(), picked, rtol=0, atol=1e-6)
    one, other = top_logps(logits, plain), top_logps(logits, mixed)
    assert (one[0], one[5]) == (other[0], other[5]) and one[3] != other[3]
    on_device = [device_sampling(asked, 500) for asked in (plain, mixed)]
    before, after = (sample_on_device(logits, asked) for asked in on_device)
    assert torch.equal(before.logps[[0, 1, 2, 5]], after.logps[[0, 1, 2, 5]])
    one_device, other_device = (top_on_device(logits, asked) for asked in on_device)
    assert one_device is not None and other_device is not None
    assert torch.equal(one_device[1][[0, 2]], other_device[1][[0, 2]])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running


def model_logits(ids: list[int]) -> torch.Tensor:
    """Of the served model, float64 [T, V]."""
    model, lengths = make_model(), [len(ids)]
    context = PackedContext.from_lengths(lengths)
    with torch.no_grad():
        hidden = model(torch.tensor(ids), packed_positions(lengths), context)
        return model.logits(hidden).double()


@pytest.mark.parametrize(("mode", "of_temperature"), [("tempered", 0.5), ("raw", 1.0), (None, 0.5)])
def test_a_client_chooses_the_mode(served: Served, mode: str | None, of_temperature: float) -> None:
    asked = {"temperature": 0.5, "max_tokens": 1, "seed": 4}
    given = asked if mode is None else asked | {"logprobs_mode": mode}
    ids = make_tokenizer().encode("hello, the world")
    right_TV = torch.log_softmax(model_logits(ids) / of_temperature, -1)

    text = {"prompt": ids, "logprobs": 2, "echo": True, **given}
    _, answer = served.send("/v1/completions", text)
    logprobs = answer["choices"][0]["logprobs"]
    echoed = [right_TV[i, token].item() for i, token in enumerate(ids[1:])]
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(echoed, abs=TOLERANCE)
    likeliest = max(logprobs["top_logprobs"][-1].values())
    assert likeliest == pytest.approx(right_TV[-1].max().item(), abs=TOLERANCE)

    params = asked if mode is None else asked | {"logps_mode": mode}
    _, answer = served.send("/generate", {"ids": ids, "params": params})
    output = answer["outputs"][0]
    right = right_TV[-1, output["ids"][0]].item()
    assert output["logps"] == pytest.approx([right], abs=TOLERANCE)

    chat = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, **given}
    _, answer = served.send("/v1/chat/completions", chat | {"return_token_ids": True})
    choice = answer["choices"][0]
    last_V = model_logits(answer["prompt_token_ids"])[-1]
    right = torch.log_softmax(last_V / of_temperature, -1)[choice["token_ids"][0]].item()
    assert choice["logprobs"]["content"][0]["logprob"] == pytest.approx(right, abs=TOLERANCE)


def test_an_unknown_mode_is_refused_by_name(served: Served) -> None:
    with pytest.raises(ValueError, match="logps_mode='processed': one of tempered, raw"):
        SamplingParams(logps_mode="processed")  # type: ignore[arg-type]
    status, answer = served.send("/v1/completions", {"prompt": "a", "logprobs_mode": "processed"})
    assert status == 400 and answer["error"]["param"] == "logprobs_mode"
    body = {"ids": [1], "params": {"logps_mode": "processed"}}
    status, answer = served.send("/generate", body)
    assert status == 400 and "one of tempered, raw" in answer["error"]["message"]
