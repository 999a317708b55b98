"""What a run is made of before anything heavy starts: options, tasks, tokenizer, model folder.

Everything that can be wrong with a user's input is found here, before any work is done. A `Parts`
is made of the options alone, so every process of a run makes its own and they all agree. Left out:
engines, sandboxes and agents, which are roles (nanorl/distributed/roles/), and what they then do
(phases.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from nanoengine.adapters.lora import choose_targets
from nanoengine.config import EngineConfig, UpdateConfig
from nanoengine.determinism import require_deterministic_cublas
from nanoengine.formats.families import sees
from nanoengine.formats.hf import model_class
from nanoengine.formats.sources import SMOLLM2, resolve_model
from nanoengine.model.config import ModelConfig
from nanoengine.parallel.device import resolve_device
from nanoinfer.config import InferConfig
from nanorl.agents.loops import load_loop
from nanorl.algorithms.hindsight import check_demonstrations, most_tokens
from nanorl.algorithms.observed import Scaffold
from nanorl.algorithms.option_groups import DISTILLS
from nanorl.envs.code import CodeKind
from nanorl.envs.env_kind import EnvKind, TaskSet
from nanorl.envs.judged import judges_of
from nanorl.envs.tasks.readers import read_tasks
from nanorl.envs.tasks.records import TaskFields
from nanorl.envs.tasks.source import ListTasks, Split
from nanorl.options.agent_kit import run_agent, run_loop
from nanorl.options.presets import get_preset
from nanorl.options.reference_check import check_reference
from nanorl.options.reference_names import parse_references, shares_of
from nanorl.options.run_config import RunConfig
from nanorl.options.run_curriculum import run_curriculum
from nanorl.options.run_kind import members_of_kind, pictures_folder, run_kind, run_tokenizer
from nanorl.options.run_sizes import sized
from nanorl.options.vision_config import VisionOptions
from nanorl.task import Task
from nanorl.types import kind_of
from nanosched.resources import Resources


@dataclass(kw_only=True)
class Tasks:
    """The two sides of the data; training batches are a function of the step alone."""

    train: TaskSet
    heldout: Sequence[Task]

    @property
    def fingerprint(self) -> str:
        return self.train.fingerprint


class Parts:
    """The light parts of one run, and the options of its engines."""

    def __init__(self, config: RunConfig, *, env: object = None) -> None:
        """`self.config` is `config` with the device and the sizes that were chosen. `env` is an
        environment given as an object, in place of the one that the options name."""
        if config.cluster.backend == "ray":
            # Its processes have the working directory that Ray was started in.
            config = replace(config, out=config.run_dir.absolute())
        if config.deterministic:
            require_deterministic_cublas()  # before anything touches a GPU
        self.device = resolve_device(config.device)
        self.kind = run_kind(config, env)
        self.is_env_given = env is not None
        if judges_of(self.kind) or config.cluster.judges > 1:
            from nanorl.options.run_judges import settle_judges  # here: few runs have judges

            settle_judges(config, self.kind)  # before `sized` looks at what memory is left
        self.tasks = load_tasks(config, self.kind)  # first: the model may have to be fetched
        check_loops(config, self.kind, self.tasks)
        run_curriculum(config)  # refused here, before any work, if it is none
        self.folder = model_folder(config)
        if config.cluster.backend == "ray":
            self.folder = self.folder.absolute()
        self.shape = ModelConfig.from_folder(self.folder)
        check_positions(config, self.shape)
        check_sight(config, self.shape, self.tasks.heldout)
        check_lora(config, self.shape)
        check_reference(config, self.folder, self.shape)
        self.tokenizer = run_tokenizer(config, self.folder)
        is_observing = config.rl.algorithm.observation_coef != 0
        self.scaffold = Scaffold(self.tokenizer) if is_observing else None
        check_top_k(config, self.shape)
        check_teacher(config)
        if config.rl.reference and config.rl.steps:
            self._check_kinds(config)
        if config.rl.algorithm.has_hindsight and config.rl.steps:
            self._check_hindsight(config)
        self.config = sized(config, self.shape, self.device)

    @property
    def pictures(self) -> Path | None:
        """The folder of the run's pictures; None for a model that reads text alone."""
        return pictures_folder(self.config) if sees(self.shape.model_type) else None

    def _check_kinds(self, config: RunConfig) -> None:
        """`ValueError` for tasks of the first step that no reference is named for."""
        names = parse_references(config.rl.reference)
        for task in self.tasks.train.batch(0, config.rl.tasks_per_step):
            shares_of(kind_of(task.task_id), names)

    def _check_hindsight(self, config: RunConfig) -> None:
        """`ValueError` for hindsight that this model, agent or these tasks have no place for."""
        spec, most = config.rl.algorithm, self.shape.max_position_embeddings
        if is_behind_api(config, self.kind):
            raise ValueError(
                f"--rl.algorithm.hindsight {spec.hindsight}: an agent that calls an API writes "
                "its own prompts, and a teacher would have to read others; choose another "
                "--agent, or --rl.algorithm.hindsight none"
            )
        longest = config.agent.max_context_tokens + most_tokens(spec, self.tokenizer)
        if longest > most:
            raise ValueError(
                f"--rl.algorithm.hindsight-tokens {spec.hindsight_tokens}: with "
                f"--agent.max-context-tokens {config.agent.max_context_tokens} a teacher reads up "
                f"to {longest} tokens, and this model knows {most} positions; lower one of them"
            )
        check_demonstrations(spec, self.tasks.train.batch(0, config.rl.tasks_per_step))

    @property
    def num_parameters(self) -> int:
        whole = model_class(self.shape)(self.shape, device="meta")
        return sum(one.numel() for one in whole.parameters())

    def infer_config(self) -> InferConfig:
        """The options of an inference engine."""
        limits = self.config.engine
        return InferConfig(
            **shared(InferConfig, limits),
            cache_bytes=limits.cache_mb << 20,
            eos_ids=tuple(sorted(self.tokenizer.eos_ids)),
            deterministic=self.config.deterministic,
        )

    def engine_config(self, update: UpdateConfig, **options: Any) -> EngineConfig:
        """The training engine's options of one phase: those of the run, of its engines and of
        `update` that have the same names."""
        given = shared(EngineConfig, self.config, self.config.engine, self.config.learner, update)
        vision = self.config.vision
        given |= {"vision_train": vision.train, "vision_lr": vision.lr}
        if self.config.learner.cp > 1:
            given["share_prefix"] = False  # ring attention reads every row
        return EngineConfig(**given | options)

    def warm_start_config(self) -> EngineConfig:
        warm = self.config.warm_start
        return self.engine_config(
            warm,
            warmup_steps=min(warm.warmup_steps, warm.steps // 2),
            total_steps=max(warm.steps, 1),
        )

    def rl_config(self) -> EngineConfig:
        rl = self.config.rl
        return self.engine_config(rl, total_steps=max(rl.steps * rl.epochs * rl.minibatches, 1))

    def critic_config(self) -> EngineConfig:
        """As the policy's, and one checkpoint more: the policy's last may still name the oldest."""
        rl = self.config.rl
        update = UpdateConfig(
            lr=rl.critic_lr, weight_decay=rl.weight_decay, max_grad_norm=rl.max_grad_norm
        )
        return self.engine_config(
            update,
            lm_head_fp32=False,
            keep_checkpoints=self.config.keep_checkpoints + 1,
            zero=0,  # a critic is one process's
        )


def shared(kind: type, *records: Any) -> dict[str, Any]:
    """The fields of the dataclass `kind` that the records have by the same names; the last wins."""
    names = {field.name for field in fields(kind)}
    return {
        field.name: getattr(record, field.name)
        for record in records
        for field in fields(record)
        if field.name in names
    }


def num_threads(config: RunConfig) -> int:
    return config.threads or int(Resources.of_machine().num_cpus)


def model_folder(config: RunConfig) -> Path:
    """The Hugging Face folder of the run's model; builds or downloads the preset's if needed."""
    if config.model is not None:
        folder = resolve_model(config.model, config.cache_dir)
        if (folder / "model-trained").is_dir():
            raise ValueError(
                f"--model {config.model}: is a run's folder; its model is {folder}/model-trained"
            )
        return folder
    if build := get_preset(config.preset).build_model:
        folder = config.run_dir / "model"
        if not (config.resume or config.fork):
            resolve_name(build)(folder, config.seed)
        return folder
    return resolve_model(SMOLLM2.name, config.cache_dir)


def check_sight(config: RunConfig, shape: ModelConfig, tasks: Sequence[Task]) -> None:
    """`ValueError` where a model that sees would be trained in a way that sees no pictures yet, and
    where one that reads text would be shown some by its tasks, or has options of a tower."""
    vision = config.vision
    if not sees(shape.model_type):
        if vision != VisionOptions():
            raise ValueError(
                f"--vision.train {vision.train}, --vision.lr {vision.lr}: the model reads text, "
                "and has no tower; leave them out"
            )
        if shown := next((task.task_id for task in tasks if task.pictures), ""):
            raise ValueError(
                f"the task {shown} shows pictures, and the model reads text alone: take one with a "
                "vision tower (--model)"
            )
        return
    if config.lora.rank and (vision.train == "merger" or vision.lr is not None):
        raise ValueError(
            f"--vision.train {vision.train}, --vision.lr {vision.lr} with --lora.rank "
            f"{config.lora.rank}: an adapter leaves the tower frozen; leave one of them out"
        )
    blind = {
        "--rollout.addresses": bool(config.rollout.addresses),
    }
    if found := [name for name, is_asked in blind.items() if is_asked]:
        raise ValueError(
            f"{', '.join(found)}: the model sees, and pictures do not get there yet; leave "
            "it out, or take a model that reads text"
        )


def check_positions(config: RunConfig, model: ModelConfig) -> None:
    """`ValueError` if a rollout may grow longer than the model was made for."""
    wanted, most = config.agent.max_context_tokens, model.max_position_embeddings
    if wanted > most:
        raise ValueError(
            f"--agent.max-context-tokens {wanted}: must be at most {most}, the positions that this "
            "model knows (max_position_embeddings)"
        )


def check_teacher(config: RunConfig) -> None:
    """`ValueError` where the loss distils and nobody teaches: without a name the reference is the
    policy as RL begins, from which it has no distance and so no gradient."""
    spec = config.rl.algorithm
    has_teacher = spec.has_hindsight or config.rl.reference
    if config.rl.steps and spec.loss in DISTILLS and not has_teacher:
        raise ValueError(
            f"--rl.algorithm.loss {spec.loss}: it distils a teacher, and none is named: the policy "
            "would learn from what it was when RL began, which is nothing; give --rl.reference "
            "FOLDER, or choose sdft or sdpo, where the policy teaches itself in hindsight"
        )


def check_top_k(config: RunConfig, model: ModelConfig) -> None:
    """`ValueError` if more tokens are to be compared than the vocabulary has."""
    spec = config.rl.algorithm
    if spec.loss == "opd_topk" and spec.top_k > model.vocab_size:
        raise ValueError(
            f"--rl.algorithm.top-k {spec.top_k}: must be at most {model.vocab_size}, the tokens of "
            "this model's vocabulary"
        )


def check_lora(config: RunConfig, model: ModelConfig) -> None:
    """`ValueError` for targets of an adapter that the model does not have."""
    if config.lora.rank:
        try:
            choose_targets(model_class(model)(model, device="meta"), config.lora.targets)
        except ValueError as error:
            raise ValueError(f"--lora.{error}") from None


def check_loops(config: RunConfig, kind: EnvKind, tasks: Tasks) -> None:
    """`ValueError` for an agent loop that does not exist: the run's own, or one that a task names,
    as far as tasks are known before they are drawn."""
    is_api = is_behind_api(config, kind)
    run_agent(config, kind)  # of several environments: limits of each that fit together
    if config.warm_start.steps and is_api:
        raise ValueError(
            f"--warm-start.steps {config.warm_start.steps}: there is no teacher for an agent that "
            "calls an API; set --warm-start.steps 0, or --fork a run that was warmed up without it"
        )
    sources = getattr(tasks.train, "sources", {"": tasks.train}).values()
    listed = [one for train in sources if isinstance(train, ListTasks) for one in train.tasks]
    for name in {task.agent for task in (*listed, *tasks.heldout) if task.agent}:
        try:
            load_loop(name)
        except ValueError as error:
            raise ValueError(f"a task's agent {name!r}: {error}") from None


def is_behind_api(config: RunConfig, kind: EnvKind) -> bool:
    """Say whether a run has an agent that calls the policy through an API."""
    loops = (run_loop(config, one) for one in members_of_kind(kind).values())
    return any(getattr(loop, "is_behind_api", False) for loop in loops)


def load_tasks(config: RunConfig, kind: EnvKind) -> Tasks:
    """The tasks of `--tasks`, or else the environment's own."""
    count, seed = config.evaluation.num_drawn, config.evaluation.seed
    source: TaskSet
    if config.tasks is not None:
        # Whose score compares answers is known of these alone; others may need none.
        needs_answer = isinstance(kind, CodeKind)
        fields = TaskFields.parse(config.task_fields, needs_answer=needs_answer)
        read = read_tasks(config.tasks, fields)
        splits: tuple[Split, ...] = ("train", "heldout") if config.rl.steps else ("heldout",)
        source = ListTasks(read, config.seed, name=config.tasks, splits=splits)
    else:
        source = kind.tasks(config.seed)
    return Tasks(train=source, heldout=source.heldout(count, seed))
