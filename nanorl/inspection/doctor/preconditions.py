"""What can be seen before anything is played: chat template, tasks, memory and disk.

Left out: options that exclude each other, which are refused where they are read (options/).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from nanoengine.plan.footprint import AVERAGE_WIDTH, CHECKPOINT_WIDTH, WIDTH
from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.agents.tokens import OPENING
from nanorl.observability.alarms.finding import Finding, Severity, quoted
from nanorl.options.run_config import RunConfig
from nanorl.task import Task, content_id
from nanorl.types import Rollout

FEW_HELDOUT = 20
"""Held-out tasks: of fewer, one more or less is five percent."""
NEARLY_FULL = 0.8
PROCESS_BYTES = 600 << 20
"""What Python and PyTorch take beside the model, roughly."""
SYSTEM_MARK = "be brief and exact"


def template_findings(tokenizer: ChatTokenizer) -> list[Finding]:
    """The chat template and the tokens that end a turn."""
    if tokenizer.chat_template is None:
        return [
            Finding(
                name="no_template",
                severity=Severity.ERROR,
                seen="the model folder has no chat template",
                why="nobody knows how this model is told who speaks",
                remedy="take an -Instruct model, or put its template into chat_template.jinja",
            )
        ]
    try:
        ids = tokenizer.encode_chat(
            [*OPENING, {"role": "assistant", "content": "b"}], add_generation_prompt=False
        )
    except ValueError as error:
        return [
            Finding(
                name="bad_template",
                severity=Severity.ERROR,
                seen=f"the chat template cannot write a chat of two messages ({error})",
                why="no task can be opened",
                remedy="mend chat_template in the model folder, or take the model's newer files",
            )
        ]
    if set(ids) & tokenizer.eos_ids:
        return []
    ends = tokenizer.decode(ids[-1:])
    return [
        Finding(
            name="template_without_eos",
            severity=Severity.ERROR,
            seen=f"the chat template ends an assistant's turn with {ends!r}, which is none of the "
            f"eos ids {sorted(tokenizer.eos_ids)}",
            why="the engine does not stop there, so turns run on until they are cut off",
            remedy="add the id of the template's end-of-turn token to eos_token_id in "
            "generation_config.json",
        )
    ]


def system_finding(tokenizer: ChatTokenizer, opening: Sequence[Message]) -> Finding | None:
    """A system message that the template refuses or leaves out."""
    if all(message["role"] != "system" for message in opening):
        return None
    chat: list[Message] = [
        {"role": "system", "content": SYSTEM_MARK},
        {"role": "user", "content": "a"},
    ]
    try:
        is_shown = SYSTEM_MARK in tokenizer.render(chat, add_generation_prompt=True)
        seen = "the chat template leaves the system message out"
    except ValueError as error:
        is_shown, seen = False, f"the chat template takes no system message ({error})"
    if is_shown:
        return None
    return Finding(
        name="no_system_role",
        severity=Severity.ERROR,
        seen=seen,
        why="the environment opens with one, and the model would never read it",
        remedy="leave `system` empty and begin the task's prompt with that text",
    )


def prompt_finding(lengths: Sequence[int], config: RunConfig) -> Finding | None:
    """Openings that leave no room for an answer. `lengths` are in tokens, one a task."""
    most = config.agent.max_context_tokens
    longest = max(lengths, default=0)
    if longest + config.agent.max_turn_tokens <= most:
        return None
    num_long = sum(length >= most for length in lengths)
    return Finding(
        name="long_prompts",
        severity=Severity.ERROR if num_long else Severity.WARNING,
        seen=f"the longest of {len(lengths)} prompts has about {longest} tokens, "
        f"--agent.max-context-tokens is {most}",
        why="a prompt that does not fit ends the run"
        if num_long
        else f"not even one turn of --agent.max-turn-tokens {config.agent.max_turn_tokens} fits",
        remedy=f"set --agent.max-context-tokens {longest + 2 * config.agent.max_turn_tokens} or "
        "more, or drop long tasks",
    )


def heldout_findings(train: Sequence[Task], heldout: Sequence[Task]) -> list[Finding]:
    """A held-out set that says little, or was trained on. `train` may be a part of it."""
    found = []
    if len(heldout) < FEW_HELDOUT:
        found.append(
            Finding(
                name="few_heldout",
                severity=Severity.WARNING,
                seen=f"there are {len(heldout)} held-out tasks",
                why=f"one task more or less is {1 / max(len(heldout), 1):.0%} of success, so no "
                "gain can be told from luck",
                remedy="give more tasks (a hundred held-out ones, if there are), or mark more of "
                "them split='heldout'",
            )
        )
    trained = {_content(task) for task in train}
    common = [task for task in heldout if _content(task) in trained]
    if common:
        found.append(
            Finding(
                name="heldout_overlap",
                severity=Severity.WARNING,
                seen=f"{len(common)} of {len(heldout)} held-out tasks are trained on too, as "
                f"{quoted(common[0].prompt_text)}",
                why="success on them shows what was learnt by heart",
                remedy="leave `split` to the hash of the content, or take the double ones out",
            )
        )
    return found


def teacher_finding(traces: Sequence[Rollout], errors: Sequence[str]) -> Finding | None:
    """A teacher whose traces teach nothing good."""
    if errors:
        seen, severity = f"the teacher failed: {errors[0]}", Severity.ERROR
    elif traces and all(trace.total_reward <= 0.0 for trace in traces):
        status = traces[0].status
        seen = f"none of {len(traces)} tasks that the teacher played earned anything ({status})"
        severity = Severity.WARNING
    else:
        return None
    return Finding(
        name="teacher_fails",
        severity=severity,
        seen=seen,
        why="the warm start trains on what the teacher does",
        remedy="mend Env.teacher until score gives it 1.0, or set --warm-start.steps 0",
    )


def missing_teacher(config: RunConfig, *, has_teacher: bool) -> Finding | None:
    """A warm start that nobody can show."""
    if has_teacher or not config.warm_start.steps:
        return None
    return Finding(
        name="no_teacher",
        severity=Severity.ERROR,
        seen=f"--warm-start.steps {config.warm_start.steps}, but the environment has no teacher",
        why="the warm start trains on a teacher's traces",
        remedy="define `teacher(self, observations, rng)` in the Env, or set --warm-start.steps 0",
    )


def memory_finding(needed: float, free: int) -> Finding | None:
    """Bytes that the run will take, against those that are free."""
    if needed <= NEARLY_FULL * free:
        return None
    return Finding(
        name="memory",
        severity=Severity.ERROR if needed > free else Severity.WARNING,
        seen=f"the run takes about {needed / 2**30:.1f} GiB of memory, "
        f"{free / 2**30:.1f} GiB are free",
        why="a run that needs more is killed without a word",
        remedy="take a smaller --model, --dtype bf16, a smaller --engine.cache-mb or "
        "--engine.micro-batch-tokens, or end what else runs here",
    )


def disk_finding(config: RunConfig, num_parameters: int, free: int) -> Finding | None:
    """Checkpoints and the model, against what is free where they are written."""
    needed = disk_bytes(config, num_parameters)
    if needed <= NEARLY_FULL * free:
        return None
    return Finding(
        name="disk",
        severity=Severity.ERROR if needed > free else Severity.WARNING,
        seen=f"{config.keep_checkpoints} checkpoints, one being written and the model take "
        f"{needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on the disk of "
        f"{config.run_dir}",
        why="the run stops where a checkpoint does not fit",
        remedy="make room, choose another --out, or set --keep-checkpoints 1",
    )


def disk_bytes(config: RunConfig, num_parameters: int) -> int:
    """The old checkpoints stay until the new one is written; a critic has its own."""
    spec = config.rl.algorithm
    checkpoint = CHECKPOINT_WIDTH * num_parameters * (2 if spec.needs_critic else 1)
    checkpoint += AVERAGE_WIDTH * num_parameters * spec.has_average
    models = WIDTH[config.dtype] * num_parameters * (2 if spec.needs_reference else 1)
    return checkpoint * (config.keep_checkpoints + 1) + models


def free_disk_bytes(folder: Path) -> int:
    """Free on the disk of a folder that need not exist yet."""
    place = folder.expanduser().resolve()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _content(task: Task) -> str:
    """An id of what makes two tasks the same, whatever their ids and splits are."""
    return content_id(task.kind, task.prompt, task.answer, task.files, task.data)
