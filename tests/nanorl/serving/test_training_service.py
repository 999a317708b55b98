"""The official client trains against the service, bit for bit as nanoengine alone does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import make_model, make_tokenizer, save_folder
from training_service import KEY, SIZES, Served, serve

from nanoengine.adapters.lora import read_adapter
from nanoengine.adapters.lora_adapter import LoraAdapter, LoraBase
from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.adapters.lora_engine import LoraEngine
from nanoengine.config import EngineConfig
from nanoengine.formats.hf import load_model, read_state
from nanoengine.optim import lr_at
from nanoengine.packing import MicroBatch, Sample
from nanoengine.state.whole_engine import Engine
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams
from nanorl.serving.training_service.checkpoints import TinkerPath

tinker = pytest.importorskip("tinker")
types = tinker.types

RANK, SEED = 4, 3
CONFIG = EngineConfig(
    lr=1e-2,
    schedule="linear",
    total_steps=10,
    betas=(0.8, 0.9),
    eps=1e-9,
    weight_decay=0.1,
    max_grad_norm=1.5,
    deterministic=True,
)
TEXTS = ("the hello, the hello", "hello", "she held the the the lorry, he held hello")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_folder(path)
    return path


@pytest.fixture(scope="module", params=["lora", "full"])
def served(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp(request.param)
    with serve(folder, root, full=request.param == "full", max_samplers=2) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    one = served.client()
    yield one
    one.close("success").result()


def new_model(client: Any) -> Any:
    return client.create_lora_training_client(base_model="tiny", rank=RANK, seed=SEED).result()


def alone(served: Served, folder: Path) -> Engine:
    """nanoengine without the service."""
    if served.config.full:
        return Engine(load_model(folder), CONFIG)
    base = LoraBase(load_model(folder), torch.float32)
    return LoraEngine(LoraAdapter(base, LoraConfig(rank=RANK), seed=SEED), CONFIG)


def adam(step: int) -> types.AdamParams:
    return types.AdamParams(
        learning_rate=lr_at(CONFIG, step),
        beta1=CONFIG.betas[0],
        beta2=CONFIG.betas[1],
        eps=CONFIG.eps,
        weight_decay=CONFIG.weight_decay,
        grad_clip_norm=CONFIG.max_grad_norm,
    )


def supervised(ids: list[int]) -> tuple[types.Datum, Sample]:
    """A text of which the last half counts, for the client and for the engine."""
    weights = [0.0] * (len(ids) // 2) + [0.5] * (len(ids) - 1 - len(ids) // 2)
    inputs = {"target_tokens": ids[1:], "weights": weights}
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    mask = [0] + [1] * (len(ids) - 1)
    return datum, Sample(tokens=ids, loss_mask=mask, fields={"weights": [0.0, *weights]})


def cross_entropy(
    logp_T: torch.Tensor, _: Any, micro: MicroBatch
) -> tuple[torch.Tensor, dict[str, float]]:
    return (-logp_T * micro.fields_T["weights"]).sum(), {}


def importance_sampling(
    logp_T: torch.Tensor, _: Any, micro: MicroBatch
) -> tuple[torch.Tensor, dict[str, float]]:
    ratio_T = torch.exp(logp_T - micro.fields_T["logprobs"])
    return -(ratio_T * micro.fields_T["advantages"]).sum(), {}


def ppo(logp_T: torch.Tensor, _: Any, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
    ratio_T = torch.exp(logp_T - micro.fields_T["logprobs"])
    advantage_T = micro.fields_T["advantages"]
    clipped_T = torch.clamp(ratio_T, 0.95, 1.05) * advantage_T
    return -torch.min(ratio_T * advantage_T, clipped_T).sum(), {}


def logprobs(result: Any) -> list[torch.Tensor]:
    return [one["logprobs"].to_torch() for one in result.loss_fn_outputs]


def saved_weights(served: Served, model: Any, name: str) -> dict[str, torch.Tensor]:
    path = model.save_weights_for_sampler(name).result().path
    place = served.config.checkpoints / path.removeprefix("tinker://")
    if served.config.full:
        return dict(read_state(place))
    return {
        f"{module}.{letter}": tensor
        for module, change in read_adapter(place).items()
        for letter, tensor in (("A", change.low_RI), ("B", change.high_OR))
    }


def weights_alone(engine: Engine) -> dict[str, torch.Tensor]:
    if not isinstance(engine, LoraEngine):
        return dict(engine.export_state())
    return {
        f"{module}.{letter}": tensor
        for module, change in engine.adapter.changes().items()
        for letter, tensor in (("A", change.low_RI), ("B", change.high_OR))
    }


def assert_equal_weights(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def batch() -> tuple[list[types.Datum], list[Sample]]:
    data, samples = zip(*(supervised(make_tokenizer().encode(text)) for text in TEXTS), strict=True)
    return list(data), list(samples)


def test_supervised_steps_equal_those_of_the_engine_alone(
    served: Served, client: Any, folder: Path
) -> None:
    model, engine = new_model(client), alone(served, folder)
    data, samples = batch()
    losses = []
    for step in range(4):
        future = model.forward_backward(data, "cross_entropy")
        stepped = model.optim_step(adam(step)).result()
        result = future.result()
        mine = engine.train_step(samples, cross_entropy)
        assert result.metrics["loss:sum"] == mine["loss"]
        for theirs, logp in zip(logprobs(result), engine.last_logps, strict=True):
            assert torch.equal(theirs, logp[1:])
        assert stepped.metrics == {"grad_norm": mine["grad_norm"], "lr": mine["lr"]}
        losses.append(mine["loss"])
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert_equal_weights(saved_weights(served, model, "final"), weights_alone(engine))


def test_gradients_of_several_requests_add_until_the_step(
    served: Served, client: Any, folder: Path
) -> None:
    model, engine = new_model(client), alone(served, folder)
    data, samples = batch()
    for datum in data:
        model.forward_backward([datum], "cross_entropy")
        model.forward([datum], "cross_entropy")  # adds nothing
    model.optim_step(adam(0)).result()
    engine.optimizer.zero_grad()
    for sample in samples:
        engine.forward_backward([sample], cross_entropy)
    engine.update()
    assert_equal_weights(saved_weights(served, model, "added"), weights_alone(engine))


@dataclass(frozen=True)
class Rollout:
    """A prompt, what was sampled, and what the client is told of it."""

    prompt: list[int]
    ids: list[int]
    logps: list[float]

    def datum(self, advantage: float) -> types.Datum:
        """As the cookbook builds it: no target stands at the prompt's positions."""
        before = len(self.prompt) - 1
        return types.Datum(
            model_input=types.ModelInput.from_ints(self.prompt + self.ids[:-1]),
            loss_fn_inputs={
                "target_tokens": [0] * before + self.ids,
                "logprobs": [0.0] * before + self.logps,
                "advantages": [0.0] * before + [advantage] * len(self.ids),
            },
        )

    def sample(self, advantage: float) -> Sample:
        before = len(self.prompt)
        return Sample(
            tokens=self.prompt + self.ids,
            targets=[0] * before + self.ids,
            loss_mask=[0] + [1] * (before - 1 + len(self.ids)),
            fields={
                "logprobs": [0.0] * before + self.logps,
                "advantages": [0.0] * before + [advantage] * len(self.ids),
            },
        )


def sample_group(sampler: Any, prompt: list[int], seed: int) -> list[Rollout]:
    given = types.SamplingParams(max_tokens=7, seed=seed, temperature=1.0)
    asked = types.ModelInput.from_ints(prompt)
    answer = sampler.sample(asked, num_samples=4, sampling_params=given).result()
    assert len({one.sequence_id for one in answer.sequences}) == 4
    return [Rollout(prompt, one.tokens, one.logprobs) for one in answer.sequences]


def test_a_grpo_loop_samples_what_it_trains_and_equals_the_engine_alone(
    served: Served, client: Any, folder: Path
) -> None:
    model, engine = new_model(client), alone(served, folder)
    prompt = make_tokenizer().encode("hello, the")
    rollout_engine = LLMEngine(make_model(), SIZES, tokenizer=make_tokenizer())
    for step, (name, loss, config) in enumerate(
        [
            ("importance_sampling", importance_sampling, None),
            ("ppo", ppo, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}),
            ("importance_sampling", importance_sampling, None),
        ]
    ):
        sampler = model.save_weights_and_get_sampling_client().result()
        group = sample_group(sampler, prompt, seed=step)
        rollout_engine.update_weights(engine.export_state(), step + 1)
        params = SamplingParams(max_tokens=7, seed=step, n=4)
        expected = rollout_engine.generate([prompt], params)
        assert [one.ids for one in group] == [one.ids for one in expected]
        rewards = torch.tensor([float(sum(i % 3 == 0 for i in one.ids)) for one in group])
        advantages = (rewards - rewards.mean()).tolist()
        assert any(advantages), "the seed gives a group without a difference"
        pairs = list(zip(group, advantages, strict=True))
        data = [one.datum(advantage) for one, advantage in pairs]
        scored = logprobs(model.forward(data, "importance_sampling").result())
        for one, logp in zip(group, scored, strict=True):
            sampled = torch.tensor(one.logps)
            assert torch.equal(logp[len(prompt) - 1 :], sampled)
        result = model.forward_backward(data, name, config).result()
        model.optim_step(adam(step)).result()
        mine = engine.train_step([one.sample(advantage) for one, advantage in pairs], loss)
        assert result.metrics["loss:sum"] == mine["loss"]
        for theirs, logp in zip(logprobs(result), engine.last_logps, strict=True):
            assert torch.equal(theirs, logp[1:])
    assert_equal_weights(saved_weights(served, model, "after-rl"), weights_alone(engine))


def test_a_snapshot_stays_what_it_was_while_training_goes_on(client: Any) -> None:
    model = new_model(client)
    prompt = make_tokenizer().encode("hello, the")
    samplers = [client.create_sampling_client(base_model="tiny").result()]
    groups = [sample_group(samplers[0], prompt, seed=1)]
    for step in range(2):
        model.forward_backward(batch()[0], "cross_entropy").result()
        model.optim_step(adam(step)).result()
        samplers.append(model.save_weights_and_get_sampling_client().result())
        groups.append(sample_group(samplers[-1], prompt, seed=1))
    assert groups[0] != groups[1] != groups[2] != groups[0]
    # Three snapshots and two engines: each change of an engine reads the right one.
    for number in (0, 2, 1, 0, 1, 2):
        assert sample_group(samplers[number], prompt, seed=1) == groups[number]
    named = model.save_weights_for_sampler("named").result().path
    again = client.create_sampling_client(model_path=named).result()
    assert sample_group(again, prompt, seed=1) == groups[2]


def test_prompt_log_probs_are_those_of_forward(client: Any) -> None:
    model = new_model(client)
    ids = make_tokenizer().encode(TEXTS[0])
    sampler = model.save_weights_and_get_sampling_client().result()
    given = types.SamplingParams(max_tokens=1, temperature=0.7)
    whole = sampler.sample(
        types.ModelInput.from_ints(ids),
        1,
        given,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result()
    datum, _ = supervised(ids)
    (scored,) = logprobs(model.forward([datum], "cross_entropy").result())
    assert whole.prompt_logprobs[0] is None
    assert torch.equal(torch.tensor(whole.prompt_logprobs[1:]), scored)
    assert whole.topk_prompt_logprobs[0] is None
    for row, logp, token in zip(whole.topk_prompt_logprobs[1:], scored, ids[1:], strict=True):
        assert len(row) == 3 and row[0][1] >= float(logp)
        assert dict(row).get(token, float(logp)) == float(logp)
    assert [len(row) for row in whole.sequences[0].topk_logprobs] == [2]
    assert sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:] == scored.tolist()


def test_a_target_need_not_be_the_next_token(client: Any) -> None:
    model = new_model(client)
    ids = make_tokenizer().encode(TEXTS[0])
    other = [(token + 7) % 200 for token in ids[1:]]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[: i + 1]),
            loss_fn_inputs={"target_tokens": [*ids[1 : i + 1], token]},
        )
        for i, token in enumerate(other)
    ]
    whole = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": other}
    )
    (scored,) = logprobs(model.forward([whole], "cross_entropy").result())
    one_by_one = logprobs(model.forward(data, "cross_entropy").result())
    assert torch.equal(scored, torch.stack([logp[-1] for logp in one_by_one]))


def test_state_goes_on_where_it_was_saved_with_its_moments_or_without(
    served: Served, client: Any
) -> None:
    def train(model: Any, steps: range) -> None:
        for step in steps:
            model.forward_backward(batch()[0], "cross_entropy")
            model.optim_step(adam(step)).result()

    model = new_model(client)
    train(model, range(2))
    path = model.save_state("two", user_metadata={"step": "2"}).result().path
    other = served.client()  # another session, as after a restart of the client
    resumed = other.create_training_client_from_state_with_optimizer(path).result()
    fresh = other.create_training_client_from_state(path).result()
    for one in (model, resumed, fresh):
        train(one, range(2, 4))
    straight = saved_weights(served, model, "straight")
    assert_equal_weights(saved_weights(served, resumed, "resumed"), straight)
    differs = saved_weights(served, fresh, "fresh")
    assert any(not torch.equal(tensor, straight[name]) for name, tensor in differs.items())
    with pytest.warns(FutureWarning):
        model.load_state_with_optimizer(path).result()
    train(model, range(2, 4))
    assert_equal_weights(saved_weights(served, model, "back"), straight)
    assert TinkerPath.parse(path).name == "two"
    other.close("success").result()


def test_clients_side_by_side_do_not_influence_each_other(served: Served, folder: Path) -> None:
    clients = [served.client() for _ in range(2)]
    models = [new_model(one) for one in clients]
    engines = [alone(served, folder) for _ in models]
    data, samples = batch()
    shares = [(data[:1], samples[:1]), (data[1:], samples[1:])]
    for step in range(3):
        futures = []
        for model, (theirs, _) in zip(models, shares, strict=True):
            futures.append(model.forward_backward(theirs, "cross_entropy"))
        for model in reversed(models):
            futures.append(model.optim_step(adam(step)))
        futures.append(models[0].save_weights_for_sampler(f"at-{step}"))
        for future in futures:
            future.result()
        for engine, (_, mine) in zip(engines, shares, strict=True):
            engine.train_step(mine, cross_entropy)
    for number, (model, engine) in enumerate(zip(models, engines, strict=True)):
        assert_equal_weights(saved_weights(served, model, f"side-{number}"), weights_alone(engine))
    for one in clients:
        one.close("success").result()


def test_a_custom_loss_of_the_client_runs_over_the_service(
    served: Served, client: Any, folder: Path
) -> None:
    model, engine = new_model(client), alone(served, folder)
    data, samples = batch()

    def squares(_: Any, logps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = sum((logp**2).sum() for logp in logps)
        assert isinstance(loss, torch.Tensor)
        return loss, {"squares:sum": float(loss.detach())}

    result = model.forward_backward_custom(data, squares).result()
    model.optim_step(adam(0)).result()
    stats = engine.train_step(samples, lambda logp_T, _, micro: ((logp_T**2).sum(), {}))
    assert result.metrics["squares:sum"] == pytest.approx(stats["loss"], rel=1e-6)
    mine, theirs = saved_weights(served, model, "custom"), weights_alone(engine)
    for name, tensor in mine.items():
        assert torch.allclose(tensor, theirs[name], atol=1e-5), name


def test_tokenizer_and_facts_come_from_the_folder(served: Served, client: Any) -> None:
    model = new_model(client)
    text = "hello, the lorry"
    assert model.get_tokenizer().encode(text) == make_tokenizer().encode(text)
    info = model.get_info()
    assert (info.is_lora, info.lora_rank) == ((False, None) if served.config.full else (True, RANK))
    sampler = model.save_weights_and_get_sampling_client().result()
    assert sampler.get_tokenizer().encode(text) == make_tokenizer().encode(text)
    rest = tinker.RestClient(base_url=served.url, api_key=KEY)
    facts = rest.get_server_capabilities().result().supported_models
    assert "tiny" in [one.model_name for one in facts]
    path = model.save_state("listed").result().path
    listed = rest.list_checkpoints(model.model_id).result().checkpoints
    assert path in [one.tinker_path for one in listed]
    facts = rest.get_weights_info_by_tinker_path(path).result()
    assert facts.is_lora == info.is_lora and facts.base_model == info.model_data.model_name
    rest.delete_checkpoint_from_tinker_path(path).result()
    listed = rest.list_checkpoints(model.model_id).result().checkpoints
    assert path not in [one.tinker_path for one in listed]
