"""The sampler of a GPU asks for what the CPU's does: the same edits, the same log-probs. Its
functions run on a CPU here, where its kernels have their PyTorch definitions."""

import pytest
import torch
from test_sampler import batch, chi_square

from nanoinfer.gpu.device_sampler import device_sampling, sample_on_device, top_on_device
from nanoinfer.options.full_sampling import sample, top_logps
from nanoinfer.options.logit_edits import EditPlan, LogitEdits
from nanoinfer.params import SamplingParams

VOCAB = 77  # no multiple of 32: the last word of a bitmask is cut


class Odd:
    """A grammar that allows odd tokens."""

    def allowed(self) -> torch.Tensor:
        return torch.arange(VOCAB) % 2 == 1


def edits_of_every_kind() -> list[LogitEdits]:
    ids = [5, 5, 9, 40, 5, 40, 40, 76]  # four of the prompt, four sampled
    asked = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.8),
        SamplingParams(logit_bias={3: 4.0, 76: -9.0}),
        SamplingParams(allowed_token_ids=(2, 76, 31)),
        SamplingParams(repetition_penalty=0.4, frequency_penalty=-0.6, logit_bias={5: -1.0}),
    ]
    edits = [LogitEdits(ids, 4, params, None) for params in asked]
    return [*edits, LogitEdits(ids, 4, SamplingParams(presence_penalty=-2.0), Odd())]  # type: ignore[arg-type]


def logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(4)) * 3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_edits_leave_the_same_distribution_as_on_a_cpu(temperature: float) -> None:
    """Each row 4000 times over; between edited rows stand rows that are not."""
    edits = edits_of_every_kind()
    count = 1 if temperature == 0 else 4000
    z = logits(2 * len(edits)).repeat_interleave(count, 0)
    of_row = {i: edits[i // count // 2] for i in range(len(z)) if i // count % 2}
    asked = batch(len(z), temperature, edits=of_row)
    before = z.clone()
    tokens, logps, sampled_logps = sample_on_device(z, device_sampling(asked, VOCAB))
    assert torch.equal(z, before)
    for row, z_V in enumerate(logits(2 * len(edits))):
        mine = slice(row * count, (row + 1) * count)
        edited = z_V.clone()
        if row % 2:
            EditPlan.of([edits[row // 2]], VOCAB).apply_(edited.unsqueeze(0))
        chosen = tokens[mine]
        raw = torch.log_softmax(z_V.double() / (temperature or 1), -1)
        torch.testing.assert_close(logps[mine].double(), raw[chosen], rtol=0, atol=1e-5)
        if temperature == 0:
            assert chosen.item() == edited.argmax()
            assert sampled_logps[mine].item() == 0
            continue
        drawn_from = torch.log_softmax(edited.double() / temperature, -1)
        torch.testing.assert_close(
            sampled_logps[mine].double(), drawn_from[chosen], rtol=0, atol=1e-5
        )
        assert chi_square(chosen, drawn_from.exp()) < 2


def test_likeliest_tokens_are_the_cpus_and_ties_go_to_the_first() -> None:
    z = logits(4)
    z[2, 10] = z[2, 20] = z[2].max() + 1
    asked = batch(4, 0.7, num_top={0: 3, 2: 5, 3: VOCAB + 9})
    found = top_on_device(z, device_sampling(asked, VOCAB))
    assert found is not None
    for i, (row, expected) in enumerate(top_logps(z, asked).items()):
        count = len(expected)
        assert found[0][i, :count].tolist() == [token for token, _ in expected], row
        torch.testing.assert_close(found[1][i, :count], torch.tensor([p for _, p in expected]))
    assert found[0][1, :2].tolist() == [10, 20]
    assert top_on_device(z, device_sampling(batch(4), VOCAB)) is None


def test_greedy_rows_choose_the_cpus_tokens() -> None:
    z = logits(6)
    asked = batch(6, 0.0)
    on_device, on_cpu = sample_on_device(z, device_sampling(asked, VOCAB)), sample(z, asked)
    assert torch.equal(on_device.tokens, on_cpu.tokens)
    torch.testing.assert_close(on_device.logps, on_cpu.logps)
