"""`nanorl doctor`: what it says of this machine, and of machines that something is wrong with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanorl.cli import main
from nanorl.inspection.doctor import examination
from nanorl.inspection.doctor.engines import product_path
from nanorl.inspection.doctor.examination import (
    Examination,
    ask_child,
    engines_section,
    examine_machine,
    sandbox_section,
)
from nanorl.inspection.doctor.machine_limits import cpu_limit, memory_limit_bytes
from nanorl.inspection.doctor.packages import (
    missing_of_extras,
    packages_section,
    path_finding,
    python_finding,
)
from nanorl.inspection.doctor.section import Section
from nanorl.inspection.doctor.this_machine import (
    core_finding,
    disk_section,
    memory_section,
    processor_section,
)
from nanorl.inspection.doctor.walls import try_sandbox
from nanorl.observability.alarms.finding import Severity
from nanorl.sandbox.base import SandboxUnavailable

HOLDS = {"holds": True, "reason": "", "remedy": ""}
REFUSED = {"holds": False, "reason": "No permissions to create new namespace", "remedy": "run X"}
ENGINES = {
    "torch": "2.13.0+cpu",
    "torch_build": "CPU",
    "gpus": [],
    "compiler": "/usr/bin/g++: g++ 12",
    "cpp_kernels": True,
    "cpp_problem": "",
}


def layout(root: Path, **files: str) -> Path:
    """A machine below `root`; "proc__self__cgroup" is the name of /proc/self/cgroup."""
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_the_verb_says_it_in_words_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(module: str, *words: str, limit_s: float) -> tuple[dict[str, object], str]:
        return (ENGINES if module.endswith("engines") else HOLDS), ""

    monkeypatch.setattr(examination, "ask_child", answer)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "processor" in text and "bwrap" in text and "verdict: fine" in text
    assert str(Path.home()) not in text
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["processor"]["cores"] == os.cpu_count()
    assert document["engines"]["torch"] == "2.13.0+cpu"
    assert document["python"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_the_doctor_itself_needs_no_torch() -> None:
    program = "import sys, nanorl.commands.doctor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_machine_on_which_nothing_can_run_is_told_so_and_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        examination, "ask_child", lambda *_, **__: ({}, "ImportError: libcudart.so.12")
    )
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "libcudart.so.12" in text and "Traceback" not in text
    assert "cannot work: 2 errors" in text


def test_the_engines_are_looked_at_in_a_child() -> None:
    facts, problem = ask_child("nanorl.inspection.doctor.engines", limit_s=280)
    import torch

    assert not problem
    assert facts["torch"] == torch.__version__
    assert facts["bf16_path"] == product_path(torch.bfloat16)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGILL)", "signal 4"),
        ("raise ImportError('libtorch is gone')", "ImportError: libtorch is gone"),
        ("import time\ntime.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_child_that_ends_badly_is_a_problem_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    (tmp_path / "bad_child.py").write_text(program)
    monkeypatch.setattr(examination, "_ROOT", tmp_path)
    limit_s = 1.0 if "sleep" in program else 60.0
    facts, problem = ask_child("bad_child", limit_s=limit_s)
    assert not facts and said in problem


def test_bwrap_is_tried_by_its_canary() -> None:
    answer = try_sandbox("bwrap")
    if not answer["holds"]:
        assert answer["reason"] and answer["remedy"]
        pytest.skip(f"bubblewrap does not hold here: {answer['reason']}")
    assert answer == HOLDS


def test_a_refused_sandbox_tells_reason_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise SandboxUnavailable("no namespaces", "allow them")

    monkeypatch.setattr("nanorl.inspection.doctor.walls.open_sandbox", refuse)
    assert try_sandbox("bwrap") == {
        "holds": False, "reason": "no namespaces", "remedy": "allow them",
    }  # fmt: skip


def test_where_bwrap_does_not_hold_wasm_takes_its_place_and_without_both_nothing_runs() -> None:
    both = sandbox_section({"bwrap": HOLDS, "wasm": REFUSED})
    assert both.facts["programs_run_in"] == "bwrap" and not both.findings
    second = sandbox_section({"bwrap": REFUSED, "wasm": HOLDS})
    assert second.facts["programs_run_in"] == "wasm"
    assert [one.severity for one in second.findings] == [Severity.NOTE]
    none = sandbox_section({"bwrap": REFUSED, "wasm": REFUSED})
    assert [one.severity for one in none.findings] == [Severity.ERROR]
    assert "bwrap: run X; or wasm: run X" in none.findings[0].remedy


@pytest.mark.parametrize(
    ("facts", "cards", "name"),
    [
        ({}, [], ""),
        ({"cpp_kernels": False, "compiler": None}, [], "no_cpp_kernels"),
        ({"cpp_kernels": False, "cpp_problem": "g++: error: X"}, [], "no_cpp_kernels"),
        ({}, ["NVIDIA L4, 24 GB"], "unused_gpu"),
        ({"torch_build": "CUDA 13.0"}, ["NVIDIA L4, 24 GB"], "unused_gpu"),
        ({"torch_build": "CUDA 13.0", "gpus": ["L4"]}, ["NVIDIA L4, 24 GB"], ""),
    ],
)
def test_faults_of_the_engines_are_found(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], cards: list[str], name: str
) -> None:
    monkeypatch.setattr(examination, "nvidia_cards", lambda: cards)
    found = engines_section({**ENGINES, **facts}, "").findings
    assert [one.name for one in found] == ([name] if name else [])
    assert all(one.remedy for one in found)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        (
            {"proc__self__cgroup": "0::/a/b\n", "sys__fs__cgroup__a__cpu.max": "150000 100000\n"},
            1.5,
        ),
        ({"proc__self__cgroup": "0::/a\n", "sys__fs__cgroup__a__cpu.max": "max 100000\n"}, None),
        (
            {
                "proc__self__cgroup": "4:cpu,cpuacct:/a\n2:pids:/x\n",
                "sys__fs__cgroup__cpu__a__cpu.cfs_quota_us": "400000\n",
                "sys__fs__cgroup__cpu__a__cpu.cfs_period_us": "100000\n",
            },
            4.0,
        ),
        (
            {
                "proc__self__cgroup": "4:cpu:/a\n",
                "sys__fs__cgroup__cpu__a__cpu.cfs_quota_us": "-1\n",
                "sys__fs__cgroup__cpu__a__cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_the_cores_of_a_container_are_read(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    assert cpu_limit(layout(tmp_path, **files)) == cores


def test_a_container_with_less_time_than_cores_is_told_how_many_threads_to_use() -> None:
    assert core_finding(8, None) is None and core_finding(8, 8.0) is None
    found = core_finding(64, 2.5)
    assert found is not None and "--threads 2" in found.remedy
    found = core_finding(4, 0.5)
    assert found is not None and "--threads 1" in found.remedy


def test_the_instruction_sets_and_the_memory_of_a_machine_are_read(tmp_path: Path) -> None:
    root = layout(
        tmp_path,
        proc__cpuinfo="processor: 0\nmodel name : A 1\nflags : fpu avx2 amx_bf16\n\nflags: x\n",
        proc__meminfo="MemTotal: 9000 kB\nMemAvailable: 5000 kB\n",
        proc__self__cgroup="0::/a\n",
        **{"sys__fs__cgroup__a__memory.max": "4000\n"},
    )
    facts = processor_section(root).facts
    assert facts["model"] == "A 1" and facts["instruction_sets"] == ["avx2", "amx_bf16"]
    memory = memory_section(root)
    assert memory.facts["machine_bytes"] == 9000 << 10
    assert memory.facts["container_limit_bytes"] == 4000 == memory_limit_bytes(root)
    assert [one.name for one in memory.findings] == ["low_memory"]


def test_a_disk_that_is_full_or_not_ours_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanorl.inspection.doctor import this_machine as machine

    section = disk_section([("cache", tmp_path / "not" / "made" / "yet")])
    assert section.facts["free_in_cache_bytes"] > 0
    monkeypatch.setattr(machine, "LEAST_DISK_BYTES", 1 << 62)
    [full] = disk_section([("cache", tmp_path)]).findings
    assert full.name == "low_disk" and "--cache-dir" in full.remedy
    monkeypatch.setattr(os, "access", lambda *_: False)
    [locked] = disk_section([("this_folder", tmp_path)]).findings
    assert locked.severity is Severity.ERROR and "--out" in locked.remedy


def test_a_user_without_a_home_is_told_what_it_costs() -> None:
    [homeless] = disk_section([("cache", Path("~no_such_user_here/.cache/nanorl"))]).findings
    assert homeless.severity is Severity.WARNING and "HOME" in homeless.remedy


def test_an_old_python_and_a_command_of_another_environment_are_found(tmp_path: Path) -> None:
    assert python_finding((3, 11)) is None
    found = python_finding((3, 10))
    assert found is not None and "3.10" in found.seen
    assert path_finding(None) is not None
    other = path_finding(str(tmp_path / "nanorl"))
    assert other is not None and str(tmp_path) in other.seen
    assert path_finding(str(Path(sys.executable).parent / "nanorl")) is None


def test_extras_are_told_by_what_they_lack() -> None:
    requirements = [
        "torch>=2.11",
        'pytest>=8; extra == "dev"',
        "no-such-package-here[x]>=1 ; extra == 'dev'",
        'pytest>=8; python_version >= "3.11" and extra == "test"',
    ]
    assert missing_of_extras(requirements) == {"dev": ["no-such-package-here"], "test": []}
    assert packages_section().facts["numpy"]


def test_the_home_folder_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    section = Section(title="python", facts={"executable": "/home/somebody/v/bin/python"})
    found = Examination(sections=[section])
    assert "~/v/bin/python" in found.text() and "somebody" not in json.dumps(found.to_json())


def test_what_takes_seconds_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(examination, "ask_child", lambda *_, **__: ({}, "X"))
    say: Callable[[str], None] = said.append
    examine_machine(say)
    assert len(said) == 3
