"""Flags, files and Python mean the same options: all of them, in every spelling, in one order."""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nanorl.algorithms.recipes import RECIPES, named_spec
from nanorl.cli import VERBS
from nanorl.commands.api import configured
from nanorl.options.help_text import USUAL, help_text, option_texts
from nanorl.options.names import ALIASES
from nanorl.options.presets import smollm2, smollm2_elsewhere, tiny
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import run_kind
from nanorl.run.parse import for_environment, parse_arguments, with_options

Way = Callable[[Mapping[str, Any], Path], RunConfig]
"""Options by their dotted names, and a folder to write to -> what is made of them."""


# -- the three ways in, each spelled in several ways -----------------------------------------------


def text_of(value: Any) -> str:
    return str(value)


def flags(options: Mapping[str, Any], *, dash: str = "-", joined: bool = False) -> list[str]:
    """A command line of them."""
    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', dash)}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{name.replace('_', dash)}")
        elif isinstance(value, tuple):
            words += [flag, *map(text_of, value)]
        else:
            words += [f"{flag}={text_of(value)}"] if joined else [flag, text_of(value)]
    return words


def toml_of(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_of, value))}]"
    return repr(value) if isinstance(value, int | float) else json.dumps(text_of(value))


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Sections in sections."""
    tree: dict[str, Any] = {}
    for name, value in options.items():
        *sections, last = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree


def tables(tree: Mapping[str, Any], prefix: str = "") -> str:
    """The same as TOML, a table for each section."""
    own = [f"{k} = {toml_of(v)}\n" for k, v in tree.items() if not isinstance(v, dict)]
    inner = [
        f"[{prefix}{k}]\n{tables(v, f'{prefix}{k}.')}" for k, v in tree.items() if type(v) is dict
    ]
    return "".join([*own, *inner])


def of_file(text: str, folder: Path) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return parse_arguments(["--config", str(path)])


def dashed(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in options.items()}


def python(options: Mapping[str, Any]) -> RunConfig:
    return configured("smollm2", None, options)[0]


WAYS: dict[str, Way] = {
    "flags": lambda options, _: parse_arguments(flags(options)),
    "flags with =": lambda options, _: parse_arguments(flags(options, joined=True)),
    "flags with underscores": lambda options, _: parse_arguments(flags(options, dash="_")),
    "file, dotted": lambda options, folder: of_file(
        "".join(f"{name} = {toml_of(value)}\n" for name, value in options.items()), folder
    ),
    "file, tables": lambda options, folder: of_file(tables(nested(options)), folder),
    "file, dashes": lambda options, folder: of_file(
        "".join(f"{name} = {toml_of(value)}\n" for name, value in dashed(options).items()), folder
    ),
    "python, dotted": lambda options, _: python(options),
    "python, nested": lambda options, _: python(nested(options)),
    "python, dashes": lambda options, _: python(dashed(options)),
}


# -- every option ----------------------------------------------------------------------------------


def leaves(record: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every option, found without the reader that is tested."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(type(record)).items():
        value = getattr(record, name)
        inner = leaves(value, f"{prefix}{name}.") if dataclasses.is_dataclass(value) else None
        found |= inner if inner is not None else {prefix + name: kind}
    return found


LEAVES = leaves(RunConfig())
TOGETHER: Mapping[str, Mapping[str, Any]] = {
    "algorithm": {"algorithm": "dr_grpo"},
    "preset": {"preset": "tiny"},
    "agent.command": {"agent.loop": "command", "agent.command": "python mine.py"},
    "cluster.address": {"cluster.backend": "ray", "cluster.address": "auto"},
    "cluster.backend": {"cluster.backend": "local"},
    "cluster.delta": {
        **{"cluster.backend": "local", "cluster.transport": "disk"},
        "cluster.delta": True,
    },
    "cluster.transport": {"cluster.backend": "local", "cluster.transport": "shm"},
    "cluster.placement": {"cluster.backend": "local", "cluster.placement": "colocated"},
    "device": {"device": "cpu"},
    "env": {"env": ("code", "words=wordle")},
    "env_weights": {"env": ("code", "wordle"), "env_weights": (2.0, 0.5)},
    "env_args": {"env": "wordle", "env_args": ("words=short",)},
    "http.allow": {"http.mode": "live", "http.allow": ("api.example.org", "127.0.0.1:80")},
    "http.ca_file": {"http.ca_file": Path(__file__)},
    "http.mode": {"http.mode": "record", "http.allow": ("api.example.org",)},
    "rl.curriculum_args": {"rl.curriculum": "pools", "rl.curriculum_args": ("easy=0.5",)},
    "lora.alpha": {"lora.rank": 8, "lora.alpha": 16.0},
    "lora.base_dtype": {"lora.rank": 8, "lora.base_dtype": "int8"},
    "lora.rslora": {"lora.rank": 8, "lora.rslora": True},
    "lora.targets": {"lora.rank": 8, "lora.targets": ("q_proj", "v_proj")},
    "monitor.host": {"monitor.port": 0, "monitor.host": "0.0.0.0"},
    "rl.algorithm.advantage": {"rl.algorithm.advantage": "rloo"},
    "rl.algorithm.aggregation": {"rl.algorithm.aggregation": "prompt_mean"},
    "rl.algorithm.constant_length": {
        **{"rl.algorithm.aggregation": "constant", "rl.algorithm.constant_length": 64},
    },
    "rl.algorithm.correction": {"rl.algorithm.correction": "mis"},
    "rl.algorithm.correction_low": {
        **{"rl.algorithm.correction": "icepop", "rl.algorithm.correction_low": 0.25},
    },
    "rl.algorithm.correction_high": {
        **{"rl.algorithm.correction": "icepop", "rl.algorithm.correction_high": 4.5},
    },
    "rl.algorithm.distill_trust_region": {
        **{"algorithm": "opd", "rl.algorithm.distill_trust_region": 0.25},
    },
    "rl.algorithm.hindsight": {
        **{"algorithm": "opd", "rl.algorithm.hindsight": "solution"},
    },
    "rl.algorithm.hindsight_teacher": {
        **{"algorithm": "sdft", "rl.algorithm.hindsight_teacher": "reference"},
    },
    "rl.algorithm.kl_reward_coef": {
        **{"rl.algorithm.advantage": "gae", "rl.algorithm.kl_reward_coef": 0.125},
    },
    "rl.algorithm.loss": {"rl.algorithm.loss": "cispo"},
    "rl.algorithm.old_policy": {"rl.algorithm.old_policy": "rollout"},
    "rl.algorithm.reward_parts": {
        **{"rl.algorithm.advantage": "gdpo", "rl.algorithm.reward_parts": ("rule", "short=-.1")},
    },
    "rl.algorithm.turn_peers": {
        **{"rl.algorithm.reward_level": "turn", "rl.algorithm.turn_peers": "batch"},
    },
    "rl.batch.leftover": {
        **{"rl.batch.order": "finish", "rl.batch.oversample": 2, "rl.batch.leftover": "cut"},
    },
    "rl.batch.oversample": {"rl.batch.order": "finish", "rl.batch.oversample": 3},
    "rl.critic_warmup_steps": {"algorithm": "ppo", "rl.critic_warmup_steps": 3},
    "rl.reference": {"rl.algorithm.kl_coef": 0.5, "rl.reference": "owner/name"},
    "rl.algorithm.veto_below": {"rl.algorithm.veto_below": 1e-4},
    "rollout.addresses": {
        **{"cluster.backend": "local", "rollout.addresses": ("http://127.0.0.1:9",)},
    },
    "store": {"store": "mine.sqlite"},
    "tool.sandbox": {"tool.sandbox": "wasm"},
    "rl.algorithm.clip_low": {"rl.algorithm.clip_low": 0.1},
}
"""Options that need another one beside them, or may have few values."""

ELSEWHERE = {
    "resume": "needs a run, below",
    "fork": "needs a run, below",
    "tool.max_workers": "grows with tool.workers, below",
}


def drawn(name: str, kind: Any, default: Any) -> Any:
    """A value that is not the default."""
    rng = random.Random(name)
    inner = [one for one in typing.get_args(kind) if one is not type(None)]
    is_union = typing.get_origin(kind) not in (None, typing.Literal, tuple)
    if is_union:
        kind = inner[0]
    if typing.get_origin(kind) is typing.Literal:
        return rng.choice([one for one in typing.get_args(kind) if one != default])
    if typing.get_origin(kind) is tuple:
        named = typing.get_args(typing.get_args(kind)[0])
        return tuple(named[:2]) or ("one=1", "two=2 words")
    if kind is bool:
        return not default
    if kind in (str, Path):
        return kind("some/where else")
    if kind is int:
        return int(default or 0) + 1
    return default * 0.9375 if default else 0.03125


def case(name: str) -> Mapping[str, Any]:
    """Options that set this one, and what it needs."""
    if name in TOGETHER:
        return TOGETHER[name]
    default: Any = smollm2()
    for part in name.split("."):
        default = getattr(default, part)
    value = drawn(name, LEAVES[name], default)
    is_split = name.startswith(("learner.", "rollout."))
    return {"cluster.backend": "local", name: value} if is_split else {name: value}


ALONE = ("preset", "algorithm", "env", "env_args", "env_weights")
"""Options that choose other options' defaults, which nothing may cover up."""


def batches() -> list[dict[str, Any]]:
    """All options, as many in one run as get along: two that set the same one do not."""
    found: list[dict[str, Any]] = []
    for name in (one for one in LEAVES if one not in (*ELSEWHERE, *ALONE)):
        options = case(name)
        for batch in found:
            agrees = all(batch.get(one, value) == value for one, value in options.items())
            if agrees and is_accepted({**batch, **options}):
                batch |= options
                break
        else:
            found.append(dict(options))
    return [*found, *(dict(case(name)) for name in ALONE)]


def is_accepted(options: Mapping[str, Any]) -> bool:
    try:
        expected(options)
    except ValueError:
        return False
    return True


def expected(options: Mapping[str, Any]) -> RunConfig:
    """What the options mean, put together without the reader that is tested."""
    is_elsewhere = "env" in options
    own = smollm2_elsewhere if is_elsewhere else smollm2
    config = tiny() if options.get("preset") == "tiny" else own()
    if is_elsewhere:
        named = dataclasses.replace(config, env=options["env"])
        config = for_environment(named, run_kind(named))
    if "algorithm" in options:
        config = config.with_algorithm(options["algorithm"])
    return placed(config, nested(options))


def placed(record: Any, tree: Mapping[str, Any]) -> Any:
    values = {
        name: placed(getattr(record, name), value) if isinstance(value, dict) else value
        for name, value in tree.items()
    }
    return dataclasses.replace(record, **values)


@pytest.fixture(scope="module")
def runs() -> list[tuple[dict[str, Any], RunConfig]]:
    """Options, all of them in a few runs, and what each run must be."""
    return [(options, expected(options)) for options in batches()]


def test_every_option_is_in_one_of_the_runs_below(
    runs: list[tuple[dict[str, Any], RunConfig]],
) -> None:
    assert {*LEAVES} == {name for options, _ in runs for name in options} | ELSEWHERE.keys()
    assert len(LEAVES) >= 181
    for options, config in runs:
        assert config != smollm2(), options


@pytest.mark.parametrize("way", WAYS)
def test_every_option_means_the_same_by_every_way(
    way: str, runs: list[tuple[dict[str, Any], RunConfig]], tmp_path: Path
) -> None:
    for options, config in runs:
        assert WAYS[way](options, tmp_path).to_json() == config.to_json(), options
        assert WAYS[way](options, tmp_path) == config


@pytest.mark.parametrize("way", WAYS)
def test_a_recipe_is_whole_by_every_way(way: str, tmp_path: Path) -> None:
    for name in RECIPES:
        config = WAYS[way]({"algorithm": name, "rl.algorithm.entropy_coef": 0.5}, tmp_path)
        assert config.algorithm == name
        assert config.rl.algorithm == dataclasses.replace(named_spec(name), entropy_coef=0.5)


@pytest.mark.parametrize("way", WAYS)
def test_short_names_are_the_long_ones_by_every_way(way: str, tmp_path: Path) -> None:
    values = {
        **{"agent": "single_turn", "agent_args": ("a=1",), "sandbox_image": "an/image"},
        **{"sandbox": "landlock", "allow_unsafe_sandbox": True},
    }
    assert values.keys() == ALIASES.keys()
    config = WAYS[way](values, tmp_path)
    assert config == WAYS[way]({ALIASES[name]: value for name, value in values.items()}, tmp_path)
    assert config.agent.loop == "single_turn" and config.tool.sandbox == "landlock"


def test_options_that_end_up_as_none(tmp_path: Path) -> None:
    names = [name for name, kind in LEAVES.items() if type(None) in typing.get_args(kind)]
    assert "rl.algorithm.dual_clip" in names and len(names) >= 18
    text = dict.fromkeys(names, "None")
    for config in (
        parse_arguments(flags(text)),
        of_file(tables(nested(text)), tmp_path),
        python(dict.fromkeys(names, None)),
    ):
        for name in names:
            value: Any = config
            for part in name.split("."):
                value = getattr(value, part)
            assert value is None, name


def test_a_truth_value_may_be_written_out_and_a_section_may_be_negated() -> None:
    for words in (
        ["--no-rl.algorithm.whiten-gae"],
        ["--rl.algorithm.no-whiten-gae"],
        ["--rl.algorithm.whiten-gae", "false"],
        ["--rl.algorithm.whiten_gae=False"],
    ):
        assert parse_arguments(words).rl.algorithm.whiten_gae is False
    assert parse_arguments(["--no-allow-unsafe-sandbox"]).tool.allow_unsafe_sandbox is False


def test_more_workers_than_at_first_by_file() -> None:
    config = with_options(smollm2(), {"tool": {"workers": 1, "max_workers": 2}}, where="here")
    assert (config.tool.workers, config.tool.max_workers) == (1, 2)


# -- what wins -------------------------------------------------------------------------------------


def test_flags_and_python_come_after_the_file_and_all_after_what_they_choose(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'preset = "tiny"\nalgorithm = "gspo"\nseed = 3\nenv = "wordle"\n'
        "rl.steps = 7\nrl.lr = 1e-3\nrl.algorithm.gamma = 0.5\n"
    )
    env_defaults = expected({"preset": "tiny", "env": "wordle"})
    assert env_defaults != dataclasses.replace(tiny(), env="wordle")
    for config in (
        parse_arguments(["--rl.lr", "1e-2", "--config", str(path), "--algorithm", "dapo"]),
        configured("tiny", None, {"config": path, "rl.lr": 1e-2, "algorithm": "dapo"})[0],
    ):
        own = {"seed": 3, "rl.steps": 7, "rl.lr": 1e-2, "rl.algorithm.gamma": 0.5}
        assert config == placed(env_defaults.with_algorithm("dapo"), nested(own))


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_resumed_and_forked_by_every_way(way: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    begun = dataclasses.replace(tiny().with_algorithm("gspo"), seed=5)
    (run / "config.json").write_text(json.dumps(begun.to_json()))
    config = WAYS[way]({"resume": True, "out": run, "rl.lr": 0.125, "preset": "tiny"}, tmp_path)
    rl = dataclasses.replace(begun.rl, lr=0.125)
    assert config == dataclasses.replace(begun, rl=rl, out=run, resume=True)
    with pytest.raises(ValueError, match=r"--resume: this cannot change .* --seed 5 -> 6"):
        WAYS[way]({"resume": True, "out": run, "seed": 6, "preset": "tiny"}, tmp_path)
    with pytest.raises(ValueError, match=r"--fork .*run: .*run has no such checkpoint"):
        WAYS[way]({"fork": str(run), "out": tmp_path / "fork"}, tmp_path)
    with pytest.raises(ValueError, match="--fork x with --resume: a fork begins a run"):
        WAYS[way]({"fork": "x", "resume": True}, tmp_path)


# -- what is refused -------------------------------------------------------------------------------

WRONG = [
    ("rl.steps", "3", "must be a whole number"),
    ("rl.steps", 2.5, "must be a whole number"),
    ("rl.steps", True, "must be a whole number"),
    ("seed", "a", "must be a whole number"),
    ("rl.lr", "fast", "must be a number"),
    ("rl.lr", False, "must be a number"),
    ("dtype", "fp16", "must be one of bf16, fp32; did you mean bf16?"),
    ("tool.sandbox", "wasmtime", "must be one of "),
    ("deterministic", "no", "must be true or false"),
    ("deterministic", 1, "must be true or false"),
    ("model", 7, "must be text, or None"),
    ("out", 7, "must be a path, or None"),
    ("env_args", "a=1", "must be a list of texts, as ['a=1']"),
    ("env_args", [1], "must be text"),
    ("log", ["wandbx"], "must be one of wandb, mlflow"),
    ("learner.zero", 4, "must be one of 0, 1, 2, 3"),
    ("env_workers", "two", "must be a whole number, or None"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), WRONG)
def test_a_value_of_another_kind_is_refused_with_its_name_place_and_what_is_wanted(
    name: str, value: Any, wanted: str, tmp_path: Path
) -> None:
    said = f"{name} = {value!r}: {wanted}"
    with pytest.raises(ValueError) as caught:
        python({name: value})
    assert str(caught.value).startswith(f"train: {said}")
    with pytest.raises(ValueError) as caught:
        of_file(f"{name} = {toml_of(tuple(value) if type(value) is list else value)}\n", tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/run.toml: {said}")
    data = nested({name: value})
    with pytest.raises(ValueError) as caught:
        RunConfig.from_json(data)
    assert str(caught.value).startswith("config.json") and wanted in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rl.steps 2.5", "--rl.steps 2.5: must be a whole number"),
        ("--rl.lr=fast", "--rl.lr fast: must be a number"),
        ("--dtype fp16", "--dtype fp16: must be one of bf16, fp32; did you mean bf16?"),
        ("--log wandbx", "--log wandbx: must be one of wandb, mlflow"),
        ("--seed", "--seed: takes one value, a whole number"),
        ("--seed 1 2", "--seed 1 2: takes one value, a whole number"),
        ("--deterministic no", "--deterministic no: must be true or false"),
        ("--no-keep-start yes", "--no-keep-start yes: takes no value"),
        ("--no-seed", "--no-seed: there is no such option"),
        ("--rl.stepz 3", "--rl.stepz: there is no such option; did you mean --rl.steps?"),
        (
            "--lr 1",
            "--lr: there is no such option; did you mean --warm-start.lr or --rl.lr or "
            "--vision.lr?",
        ),
        ("--sandbx wasm", "--sandbx: there is no such option; did you mean --sandbox?"),
        ("--zzz", "--zzz: there is no such option; --help all lists them"),
        ("tiny", "tiny: is no option; each begins with --"),
        ("--rl.algorithm gspo", "--rl.algorithm: there is no such option; did you mean --algorith"),
        ("--log wandb --log otel", "--log: comes twice; give all its values after one"),
        ("--config a.toml --config b.toml", "--config a.toml: comes twice; put both files into"),
        ("--config", "--config: takes one value, a path"),
        ("--config nowhere.toml", "--config nowhere.toml: there is no such file"),
        ("--config tests", "--config tests: is a folder; name a TOML file"),
        ("--help nothing", "--help nothing: there is no such option or section; there are all"),
        ("--help rl.btach", "--help rl.btach: there is no such option or section"),
    ],
)
def test_a_flag_that_cannot_be_is_refused(words: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_arguments(words.split())
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rl.stepz = 3", "run.toml: no option is called rl.stepz; did you mean rl.steps?"),
        ("[rl]\nstepz = 3", "run.toml: no option is called rl.stepz; did you mean rl.steps?"),
        ("steps = 3", "no option is called steps; did you mean warm_start.steps or rl.steps?"),
        ("[rll]\nlr = 1.0", "run.toml: no option is called rll; did you mean rl?"),
        ("rl = 3", "run.toml: rl = 3: is a section; name an option of it, as rl.lr"),
        ("rl.algorithm = 'gspo'", "rl.algorithm = 'gspo': is a section; did you mean algorithm?"),
        ("seed.x = 3", "run.toml: seed = {'x': 3}: must be a whole number"),
        ("config = 'other.toml'", "run.toml: no option is called config"),
        ("sandbox = 'wasm'\ntool.sandbox = 'bwrap'", "run.toml: tool.sandbox stands there twice"),
        ("seed = ", "run.toml: not TOML: "),
        ("rl.lr = -1.0", "--rl.lr -1.0: must be more than 0 (in "),
        ("rl.algorithm.gamma = 2.0", "gamma=2.0: must be at most 1 (in "),
        ("preset = 'big'", "--preset big: no such preset; choose one of smollm2, tiny, "),
        ("algorithm = 'x'", "--algorithm x: no such algorithm; choose one of grpo"),
    ],
)
def test_a_file_that_cannot_be_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        of_file(text, tmp_path)
    assert said in str(caught.value) and "run.toml" in str(caught.value)


def test_a_value_of_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("rl.lr = 1e-3\n")
    with pytest.raises(ValueError) as caught:
        parse_arguments(["--config", str(tmp_path / "run.toml"), "--rl.lr", "-1"])
    assert str(caught.value) == "--rl.lr -1.0: must be more than 0"


# -- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["train", "check"])
def test_help_is_two_screens_of_what_people_use(verb: str) -> None:
    lines = help_text(verb=verb).splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 100
    assert f"nanorl {verb} " in lines[0]
    usual = [name for names in USUAL.values() for name in names]
    assert 25 <= len(usual) <= 32 and len({*usual}) == len(usual)
    assert {*usual} <= LEAVES.keys()


def test_help_all_has_every_option_with_its_text() -> None:
    shown = help_text("all")
    for name, option in option_texts().items():
        assert option.text, f"{name} has no text"
        assert f"\n  {option.flag}".rstrip() in shown
    assert option_texts().keys() == LEAVES.keys()
    assert max(map(len, shown.splitlines())) <= 100
    assert "--rl.batch.order" in help_text("rl.batch") and "--rl.lr" not in help_text("rl.batch")
    assert "Learning rate" in help_text("rl.lr") and "--sandbox NAME" in help_text("sandbox")


COMMANDS = [
    *(f"{verb} --help" for verb in VERBS),
    *("--help", "train --help all", "algorithms", "algorithms dapo", "train --rl.stepz 3"),
]
LIGHT = f"""
import sys
import nanorl.options.run_config, nanorl.run.parse, nanorl.options.help_text
import nanorl.options.presets, nanorl.commands.api
import nanoengine.config, nanoinfer.config, nanorl.commands.train, nanorl.cli
for words in {COMMANDS}:
    try:
        nanorl.cli.main(words.split())
    except SystemExit:
        pass
    if "torch" in sys.modules:
        sys.exit(f"nanorl {{words}} loads PyTorch")
"""


def test_options_and_the_help_of_every_verb_do_not_load_pytorch() -> None:
    ran = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "error: --rl.stepz: there is no such option" in ran.stderr
    assert "arXiv 2503.14476" in ran.stdout


# -- documents -------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRAINS = re.compile(r"(?:nanorl (?:train|check)|train_agent\.(?:sh|py))\b([^`#|&;]*)")


def test_every_flag_of_training_that_a_document_writes_exists() -> None:
    seen = 0
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            for command in TRAINS.findall(line):
                for flag in re.findall(r"(?<!\S)--([a-z][\w.-]*)", command):
                    seen += 1
                    if flag not in ("help", "config", "as-json"):
                        assert is_flag(flag), f"{document.name}: --{flag} in {line}"
    assert seen > 100


def is_flag(flag: str) -> bool:
    names = {*LEAVES, *ALIASES}
    name = flag.replace("-", "_")
    section, _, last = name.rpartition(".")
    return bool({name, f"{section}.{last.removeprefix('no_')}".lstrip(".")} & names)


def test_the_three_examples_of_the_page_are_one_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```bash\nnanorl train (.*)\n```", page)
    (file,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (call,) = re.findall(r"options=(\{.*\})\)", page)
    config = parse_arguments(command.split())
    assert config == of_file(file, tmp_path)
    assert config == configured("tiny", None, {**ast.literal_eval(call), "rl.steps": 20})[0]
    assert config.rl.algorithm == named_spec("gspo") and config.agent.loop == "single_turn"
