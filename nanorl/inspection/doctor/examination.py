"""`examine_machine`: everything about this machine that decides whether a run works, and how fast.

What could end the process that looks (PyTorch, the kernels, a sandbox) is looked at in a child
(engines.py, walls.py), so that the examination always comes to its end and says what it saw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanorl.inspection.doctor.packages import packages_section, python_section
from nanorl.inspection.doctor.section import Section
from nanorl.inspection.doctor.this_machine import (
    disk_section,
    gpu_section,
    memory_section,
    nvidia_cards,
    processor_section,
)
from nanorl.observability.alarms.finding import Finding, Severity, in_order, quoted, verdict

CACHE = Path("~/.cache/nanorl")
SANDBOXES = ("bwrap", "wasm")
"""The sandboxes that are tried, the preferred one first."""
ENGINES_LIMIT_S = 300  # a compiler on a busy machine
SANDBOX_LIMIT_S = 300  # the first start of wasm compiles Python
_ROOT = Path(__file__).resolve().parents[3]
_INSTALL_COMPILER = "install one: `apt install g++`, `dnf install gcc-c++`"


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All sections, and what is wrong."""

    sections: Sequence[Section]

    @property
    def findings(self) -> list[Finding]:
        """The findings of all sections, the worst first."""
        return in_order(one for section in self.sections for one in section.findings)

    @property
    def is_workable(self) -> bool:
        """True if nothing was found that keeps the default run from working."""
        return all(one.severity is not Severity.ERROR for one in self.findings)

    def text(self) -> str:
        """Plain words; the user's home folder is written as ~."""
        blocks = [section.text() for section in self.sections]
        blocks += ["\n".join(one.text() for one in self.findings), f"verdict: {self.verdict}"]
        return _without_home("\n\n".join(block for block in blocks if block))

    @property
    def verdict(self) -> str:
        return verdict(self.findings)

    def to_json(self) -> dict[str, Any]:
        """Facts by section, then findings and verdict."""
        facts = {section.title: dict(section.facts) for section in self.sections}
        found = [one.to_json() for one in self.findings]
        document = {**facts, "findings": found, "verdict": self.verdict}
        return json.loads(_without_home(json.dumps(document)))


def examine_machine(say: Callable[[str], None]) -> Examination:
    """Look at everything; `say` is told about what takes seconds."""
    sections = [
        python_section(),
        processor_section(),
        memory_section(),
        disk_section([("this_folder", Path.cwd()), ("cache", CACHE)]),
        gpu_section(),
    ]
    say("looking at PyTorch and the C++ kernels (the first time they are compiled) ...")
    sections.append(
        engines_section(*ask_child("nanorl.inspection.doctor.engines", limit_s=ENGINES_LIMIT_S))
    )
    answers = {}
    for name in SANDBOXES:
        say(f"trying the sandbox {name} ...")
        answers[name] = _sandbox_answer(
            *ask_child("nanorl.inspection.doctor.walls", name, limit_s=SANDBOX_LIMIT_S)
        )
    return Examination(sections=[*sections, sandbox_section(answers), packages_section()])


def ask_child(module: str, *words: str, limit_s: float) -> tuple[dict[str, Any], str]:
    """The JSON that a module prints when it is run, or nothing and what went wrong instead."""
    program = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); import runpy; "
    program += f"runpy.run_module({module!r}, run_name='__main__')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {limit_s:g} s"
    except OSError as error:
        return {}, str(error)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1]), ""
    if done.returncode < 0:
        return {}, f"the process was ended by signal {-done.returncode}"
    last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return {}, last[0]


def engines_section(facts: Mapping[str, Any], problem: str) -> Section:
    """PyTorch and the kernels, as the child saw them."""
    if problem:
        broken = Finding(
            name="broken_torch",
            severity=Severity.ERROR,
            seen=f"PyTorch or the kernels do not load ({problem})",
            why="nothing can be computed",
            remedy="run the set-up again; `python -c 'import torch'` shows the whole error",
        )
        return Section(title="engines", facts={"torch": None}, findings=(broken,))
    findings = (_kernel_finding(facts), _gpu_finding(facts))
    return Section(
        title="engines", facts=facts, findings=tuple(one for one in findings if one is not None)
    )


def _kernel_finding(facts: Mapping[str, Any]) -> Finding | None:
    if facts["cpp_kernels"]:
        return None
    has_compiler = facts["compiler"] is not None
    return Finding(
        name="no_cpp_kernels",
        severity=Severity.WARNING,
        seen=f"the C++ kernels are not there ({quoted(facts['cpp_problem'])})"
        if has_compiler
        else "there is no C++ compiler",
        why="PyTorch's take their place, and decode at about half the speed",
        remedy="mend what the compiler says, or try another one" if has_compiler
        else _INSTALL_COMPILER,
    )  # fmt: skip


def _gpu_finding(facts: Mapping[str, Any]) -> Finding | None:
    cards = nvidia_cards()
    if not cards or facts["gpus"]:
        return None
    is_cpu_build = facts["torch_build"] == "CPU"
    return Finding(
        name="unused_gpu",
        severity=Severity.WARNING,
        seen=f"there is a GPU ({cards[0]}), and PyTorch "
        + ("is a CPU build" if is_cpu_build else "does not reach it"),
        why="runs will use the processor alone",
        remedy="remove .venv and set it up without a CPU build (docs/install.md)"
        if is_cpu_build
        else "update the driver, or look at CUDA_VISIBLE_DEVICES",
    )


def _sandbox_answer(answer: Mapping[str, Any], problem: str) -> Mapping[str, Any]:
    return {"holds": False, "reason": problem, "remedy": ""} if problem else answer


def sandbox_section(answers: Mapping[str, Mapping[str, Any]]) -> Section:
    """Say which sandboxes hold; `answers` has walls.py's for each, the preferred one first."""
    facts = {
        name: "holds" if answer["holds"] else f"does not hold: {answer['reason']}"
        for name, answer in answers.items()
    }
    holding = [name for name, answer in answers.items() if answer["holds"]]
    facts["programs_run_in"] = holding[0] if holding else "nothing: they are refused"
    preferred = next(iter(answers))
    if holding[:1] == [preferred]:
        return Section(title="sandbox", facts=facts)
    remedies = [f"{name}: {one['remedy']}" for name, one in answers.items() if one["remedy"]]
    finding = Finding(
        name="weak_sandbox" if holding else "no_sandbox",
        severity=Severity.NOTE if holding else Severity.ERROR,
        seen=f"{preferred} does not hold here ({quoted(answers[preferred]['reason'])})",
        why=f"programs of the model run in {holding[0]} instead, whose loops are slower"
        if holding
        else "programs that a model writes have nowhere to run, and the default run is refused",
        remedy="; or ".join(remedies) or "docs/sandbox.md names other sandboxes",
    )
    return Section(title="sandbox", facts=facts, findings=(finding,))


def _without_home(text: str) -> str:
    """An examination is pasted into reports of faults: it need not say who asks."""
    home = os.path.expanduser("~")  # itself for a user without a home
    return text.replace(home, "~") if len(home) > 1 else text
