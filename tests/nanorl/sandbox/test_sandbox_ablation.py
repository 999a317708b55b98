"""The suite can fail: with one wall left out, named programs are seen to get through."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hostile_programs import BENIGN, HOSTILE
from sandbox_driver import SPEC, Examiner

from nanorl.sandbox import SandboxPool, canary

pytestmark = pytest.mark.sandbox
PROGRAMS = {program.name: program for program in (*HOSTILE, *BENIGN)}


class WithoutFilter(SandboxPool):
    ablate = frozenset({"seccomp"})


class WithoutNamespaces(SandboxPool):
    ablate = frozenset({"namespaces"})


class WithoutCgroup(SandboxPool):
    ablate = frozenset({"cgroup"})


class WithoutMemoryLimit(SandboxPool):
    ablate = frozenset({"cgroup", "watcher"})


def found(pool_class: type[SandboxPool], *names: str, timeout_s: float = 1.5) -> dict[str, str]:
    with pool_class(replace(SPEC, timeout_s=timeout_s)) as pool:
        examiner = Examiner(pool)
        try:
            return {name: " ".join(examiner.violations(PROGRAMS[name])) for name in names}
        finally:
            examiner.host.close()


def test_without_the_filter_system_calls_pass() -> None:
    names = ("memfd", "odd_families", "udp", "syscall_personality")
    names = tuple(n for n in names if PROGRAMS[n].machine in ("", os.uname().machine))
    for name, violations in found(WithoutFilter, *names).items():
        assert "escaped" in violations, name


def test_without_namespaces_daemons_and_files_stay() -> None:
    violations = found(WithoutNamespaces, "daemon_double_fork", "planted_modules")
    assert "processes are alive" in violations["daemon_double_fork"]
    assert "the next program sees" in violations["planted_modules"]


def test_without_any_memory_limit_children_add_up() -> None:
    name = "memory_of_children_summed"
    assert "expected one of ('oom',)" in found(WithoutMemoryLimit, name)[name]


def test_without_a_cgroup_the_watcher_holds_the_same_programs() -> None:
    names = [n for n in PROGRAMS if n.startswith("memory_")]
    assert len(names) >= 9
    assert found(WithoutCgroup, *names, timeout_s=5.0) == dict.fromkeys(names, "")


def test_the_canary_sees_a_missing_filter() -> None:
    with WithoutFilter(SPEC) as pool:
        assert canary.find_leak(pool.run_sync(canary.CODE)).startswith("filter")


def test_the_canary_sees_missing_namespaces() -> None:
    with WithoutNamespaces(SPEC) as pool:
        assert "processes" in canary.find_leak(pool.run_sync(canary.CODE))
