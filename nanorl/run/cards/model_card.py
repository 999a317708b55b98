"""The model card: README.md beside the weights that a run trained, whose head the hub reads.

Every figure comes from the run's own files (summary.json, eval-*.json, history.jsonl). No path of
this machine goes in: a command's are shortened to their last part. Left out: figures of other runs;
one run is one seed, and the card says so.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanorl.observability.report.evaluation import Evaluation, percent
from nanorl.observability.report.summary import EVALUATIONS, gap_text, write_atomically
from nanorl.options.run_config import RunConfig
from nanorl.run.cards.model_source import ModelSource

CARD = "README.md"
MODEL, ADAPTER = "model-trained", "adapter-trained"
"""The folders of a run that can be given away."""
PROJECT = "nanorl"
_PLACE = "PATH/TO/THIS/FOLDER"
_TRANSFORMERS = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")"""
_PEFT = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{place}")"""


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """One run's card, of the whole model or of its adapter."""

    config: RunConfig
    summary: Mapping[str, Any]
    source: ModelSource
    evaluations: Mapping[str, Evaluation]
    """By their names, untrained, before, after and no_tool; those that there are."""
    is_adapter: bool = False

    def text(self) -> str:
        """The whole file."""
        parts = [
            self._front_matter(),
            f"# {self.title}",
            self._about(),
            self._results(),
            self._training(),
            self._use(),
            self._licence(),
        ]
        return "\n\n".join(parts) + "\n"

    @property
    def title(self) -> str:
        """The run's name."""
        return self.config.run_dir.absolute().name

    @property
    def environment(self) -> str:
        """The environment in which it was trained, with tasks of the user's own; without paths."""
        named = [_without_path(one) for one in self.config.envs]
        own = f"the environment{'s' * (len(named) > 1)} {', '.join(named)}"
        if not named:
            own = f"the program-writing tasks of the preset {self.config.preset}"
        tasks = f", with the tasks {_without_path(self.config.tasks)}" if self.config.tasks else ""
        return own + tasks

    def _front_matter(self) -> str:
        """YAML, of which JSON is a part: that spares a package to write it with."""
        fields: dict[str, Any] = {
            "library_name": "peft" if self.is_adapter else "transformers",
            "pipeline_tag": "text-generation",
            "tags": [PROJECT, "reinforcement-learning", "agent", self.config.algorithm],
        }
        if self.source.licence:
            fields["license"] = self.source.licence
        if self.source.is_hub_id:
            fields["base_model"] = self.source.name
            fields["base_model_relation"] = "adapter" if self.is_adapter else "finetune"
        if results := self._model_index():
            fields["model-index"] = results
        lines = (f"{name}: {json.dumps(one, ensure_ascii=False)}" for name, one in fields.items())
        return "\n".join(["---", *lines, "---"])

    def _model_index(self) -> list[dict[str, Any]]:
        found = self.evaluations.get("after")
        if found is None:
            return []
        task = {"type": "text-generation", "name": "Text generation"}
        data = {"type": PROJECT, "name": f"held-out tasks: {self.environment}"}
        value = round(100 * found.success.value, 1)
        metric = {"type": "success", "name": "success, greedy (%)", "value": value}
        results = [{"task": task, "dataset": data, "metrics": [metric]}]
        return [{"name": self.title, "results": results}]

    def _about(self) -> str:
        what = "an adapter (LoRA) for" if self.is_adapter else "a fine-tuned copy of"
        said = [
            f"This is {what} `{self.source.name}`, trained with {PROJECT} as an agent, by "
            f"reinforcement learning ({self.config.algorithm}) in {self.environment}.",
            f"It began with {self.source.text}.",
        ]
        if not self.source.is_hub_id:
            said.append("That base has no id on the hub: only its name stands here.")
        elif self.source.is_rounded and self.is_adapter:
            said.append("The weights of that id differ from it by the rounding of the copy.")
        return " ".join(said)

    def _results(self) -> str:
        """A row for each evaluation."""
        rows = [
            f"| {title} | {percent(found.success)} | {len(found.scores)} |"
            for name, title in EVALUATIONS.items()
            if (found := self.evaluations.get(name)) is not None
        ]
        if not rows:
            return "## Results\n\nThis run measured none."
        return "\n".join(
            [
                "## Results",
                "",
                "| model | success on held-out tasks, with its 95 % interval | tasks |",
                "|---|---|---|",
                *rows,
                "",
                "Decoding is greedy, and none of the tasks was trained on. This is one run with "
                f"the seed {self.config.seed}; another seed gives other figures. The gap between "
                "the log-probs of the engine that sampled and of the one that trained was "
                f"{gap_text(self.summary)}.",
            ]
        )

    def _training(self) -> str:
        summary, rl = self.summary, self.config.rl
        warm = self.config.warm_start.steps
        facts = [
            f"base: {self.source.text}",
            f"warm start: {warm} steps on the teacher's rollouts" if warm else "no warm start",
            f"reinforcement learning: {rl.steps} steps of {rl.tasks_per_step} tasks with "
            f"{rl.group_size} rollouts each",
            f"weights computed in {self.config.dtype}; {summary['wall_s'] / 60:.1f} minutes on "
            f"{summary.get('hardware', 'a machine that was not recorded')}",
            f"{PROJECT} at commit {summary.get('git_commit') or 'unknown'}, PyTorch "
            f"{summary.get('torch_version', 'unknown')}",
        ]
        commands = "\n".join(_commands(summary))
        listed = "\n".join(f"- {fact}" for fact in facts)
        return f"## Training\n\n{listed}\n\nTo do it again:\n\n```bash\n{commands}\n```"

    def _use(self) -> str:
        named = [_without_path(one) for one in self.config.envs]
        if self.is_adapter:
            commands = f"nanorl serve {self.source.name} --adapters agent={_PLACE}"
            code = _PEFT.format(place=_PLACE, base=self.source.name)
        else:
            one = named[0] if named else "code"
            chat = f" --env {one.rpartition('=')[2] if len(named) > 1 else one}"
            commands = f"nanorl chat {_PLACE}{chat}\nnanorl eval {_PLACE}{self._played()} --k 8"
            code = _TRANSFORMERS.format(place=_PLACE)
        return f"## Use\n\n```bash\n{commands}\n```\n\n```python\n{code}\n```"

    def _played(self) -> str:
        """The options of `nanorl eval` for the tasks that the run was evaluated on."""
        one = self.config
        options = {
            "--preset": () if one.envs and one.preset == RunConfig().preset else (one.preset,),
            "--env": one.envs,
            "--env-weights": tuple(map(str, one.env_weights)),
            "--env-args": one.env_args,
            "--reward": (one.reward,),
            "--agent": (one.agent.loop,),
            "--agent-args": one.agent.loop_args,
            "--tasks": (str(one.tasks or ""),),
            "--task-fields": one.task_fields,
        }
        return "".join(
            f" {' '.join([flag, *map(_quoted, values)])}"
            for flag, values in options.items()
            if any(values)
        )

    def _licence(self) -> str:
        if self.source.licence:
            said = f"The base is under {self.source.licence}; so is what was made of it."
        else:
            said = (
                "The licence of the base is not known here. Look it up and add a line `license:` "
                "to the head of this file before you share the model."
            )
        return f"## Licence\n\n{said}"


def write_cards(config: RunConfig, summary: Mapping[str, Any], source: ModelSource) -> None:
    """Write the card of each trained folder that the run has."""
    folder = config.run_dir
    files = {name: folder / f"eval-{name}.json" for name in EVALUATIONS}
    found = {name: Evaluation.read(file) for name, file in files.items() if file.is_file()}
    for name in (MODEL, ADAPTER):
        if (folder / name).is_dir():
            card = ModelCard(
                config=config,
                summary=summary,
                source=source,
                evaluations=found,
                is_adapter=name == ADAPTER,
            )
            write_atomically(folder / name / CARD, card.text())


def _commands(summary: Mapping[str, Any]) -> list[str]:
    """Each start of the run's process, in their order."""
    events = [one for one in summary.get("history") or () if one["event"] != "restarted"]
    told = [str(event["command"]) for event in events] or [str(summary.get("command", ""))]
    return [_portable(command) for command in told if command]


def _portable(command: str) -> str:
    """A command line with `nanorl` for the file that ran, and without the paths of a machine."""
    program, *words = shlex.split(command)
    is_ours = Path(program).name in ("nanorl", "__main__.py", "cli.py", "train.py")
    named = PROJECT if is_ours else f"python {Path(program).name}"
    return " ".join([named, *map(_quoted, words)])


def _quoted(word: str) -> str:
    return shlex.quote(_without_path(word))


def _without_path(word: str) -> str:
    """A word with a path out of the working folder cut to its last part; a flag keeps its name."""
    name, sign, value = word.rpartition("=")
    is_path = value.startswith(("/", "~", "../"))
    return f"{name}{sign}{Path(value).name}" if is_path else word
