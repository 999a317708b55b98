"""Do the tests notice bugs? Plants the bugs of a drawn list, one at a time, and runs the tests.

    python scripts/mutants.py --draw 60 --seed 29        # writes tests/mutants.json; commit it
    python scripts/mutants.py --draw 30 --seed 30 --group clients --list tests/mutants_clients.json
    python scripts/mutants.py --run --rows rows.jsonl [--only ID ...] [--round after]
    python scripts/mutants.py --figures --rows rows.jsonl --out benchmarks/mutants_DATE.json

A list is drawn from the areas of a group evenly, out of the commit that it names: what may be
changed and how is mutations.py. A bug that turns out to change nothing that anybody could see is
given a reason under "equivalent" in the list, and `--draw` again takes the next of the same seed in
its place.

A run copies the working tree to a folder of its own, puts one bug into the copy, and runs the test
files of its area there until one fails: of every bug those nearest to its file, then of those still
open the others. A test that fails must pass again without the bug, or it says nothing. A bug that
hangs the tests is noticed as well. One line of JSON is written for each bug, and a run that is
repeated goes on after the lines there are.

Left out: coverage (every bug runs all tests of its area before it counts as a survivor) and several
at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_output import ROOT, write_json
from mutations import GoneError, Mutation, apply, draw

LIST = ROOT / "tests" / "mutants.json"
LIMIT_S = 240.0  # of one test file, on a busy machine; longer is a hang
AHEAD = (
    *(
        "pytest",
        "hypothesis",
        "torch",
        "openai",
        "openai.types.responses",
        "anthropic",
        "starlette",
    ),
    *("uvicorn", "httpx", "pydantic", "nanoengine.engine", "nanoinfer.async_engine"),
    *("nanoinfer.server.app", "nanoengine.text.tokenizer"),
)
NUM_STAGES = 3
FIRST_LINE = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\n]*?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Area:
    """What is changed, and the test files that should notice."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    left_out: tuple[str, ...] = ()


AREAS = {
    "sandbox": Area(
        files=("nanorl/sandbox/*.py", "nanorl/sandbox/backends/*.py", "nanorl/agents/guard.py"),
        # Machines that lack their programs skip the tests of these: scripts/test_sandboxes.sh.
        left_out=("gvisor.py", "microvm.py", "guest.py", "oci.py"),
        tests=(
            *("test_read_limits",),
            *("test_session", "test_sandbox_pool", "test_sandbox_backends", "test_sandbox_outcome"),
            *("test_sandbox_usage", "test_sandbox_seccomp", "test_session_grading", "test_tools"),
            *("test_sandbox_auto", "test_sandbox_wasm", "test_wasi_calls", "test_wasm_module"),
            *("test_agent_command", "test_workspace_tools", "test_sandbox_elastic"),
            *("test_unit_test_reward", "test_machine_doctor", "test_sandbox_hostile"),
        ),
    ),
    "endpoint": Area(
        files=("nanorl/agents/endpoint/*.py", "nanoinfer/dialects/*.py", "nanoinfer/chat/form.py"),
        left_out=("recording.py",),
        tests=(
            *("test_chat_form", "test_episode_report", "test_unreadable_arguments"),
            *("test_recording_server", "test_endpoint_messages", "test_endpoint_responses"),
            *("test_recording", "test_endpoint_abuse", "test_trajectories", "test_agent_clients"),
            *("test_agent_command", "test_turn_tokens", "test_verifiers_env", "test_api_agent"),
        ),
    ),
    "service": Area(
        files=("nanorl/serving/training_service/*.py",),
        tests=(
            *("test_sampling_requests",),
            *("test_training_service", "test_training_service_losses"),
            *("test_training_service_faults", "test_training_service_cookbook"),
            *("test_training_service_page",),
        ),
    ),
    "store": Area(
        files=("nanorl/observability/store/*.py", "nanorl/options/store_address.py"),
        tests=(
            *("test_store_places",),
            *("test_store", "test_store_slices", "test_store_blobs", "test_store_postgres"),
            *("test_replay_parts", "test_store_commands", "test_viewer", "test_run_resume"),
            *("test_replay", "test_trajectories"),
        ),
    ),
    "router": Area(
        files=("nanorl/distributed/roles/router.py", "nanorl/distributed/roles/replica_role.py"),
        tests=(
            *("test_router", "test_replica", "test_http_replica", "test_router_processes"),
            *("test_rollout_promise", "test_late_replica"),
        ),
    ),
    "supervision": Area(
        files=(
            *("nanorl/distributed/roles/cluster.py", "nanorl/distributed/roles/actor_role.py"),
            *(
                "nanorl/distributed/roles/trainer_ranks.py",
                "nanorl/distributed/roles/replica_set.py",
            ),
            *(
                "nanorl/distributed/roles/scoring_roles.py",
                "nanorl/distributed/roles/role_starter.py",
            ),
            *("nanosched/local/*.py", "nanosched/ledger.py"),
        ),
        tests=(
            *("test_without_numpy",),
            *("test_role", "test_local_processes", "test_contract"),
            *("test_resources", "test_typed_calls", "test_placement"),
            *("test_bounded_queue", "test_shared_buffer", "test_work"),
            *("test_cluster_runs", "test_late_replica", "test_async_faults", "test_faults"),
        ),
    ),
    "batching": Area(
        files=(
            *("nanorl/batching.py", "nanorl/batch_metrics.py", "nanorl/flow/*.py"),
            *("nanorl/algorithms/turn_rewards.py", "nanorl/agents/concurrency.py"),
        ),
        tests=(
            *("test_observed_tokens",),
            *("test_batching", "test_transfer_queue", "test_staleness", "test_curriculum"),
            *("test_concurrency", "test_async_training", "test_learner", "test_branches"),
            *("test_tree_training", "test_hierarchical", "test_top_k", "test_self_distillation"),
            *("test_losses", "test_loops", "test_run_lifecycle", "test_recipe_references"),
        ),
    ),
    "recorder": Area(
        files=(
            *("nanorl/agents/endpoint/recording.py", "nanorl/envs/http_record/*.py"),
            "nanoinfer/options/outputs.py",
        ),
        tests=(
            *("test_recorded_episodes",),
            *("test_http_record", "test_recording", "test_recording_server", "test_network_page"),
            *("test_endpoint_responses", "test_endpoint_messages", "test_endpoint_abuse"),
            *("test_trajectories", "test_agent_command", "test_verifiers_env", "test_api_agent"),
        ),
    ),
}
AREAS |= {
    "chat": Area(
        files=("nanoinfer/chat/*.py", "nanorl/agents/tokens.py"),
        tests=(
            *("test_template_gallery", "test_parsers", "test_model_forms"),
            *("test_reply", "test_turn_tokens", "test_chat_form", "test_chat_tokens"),
            *("test_chat_answers", "test_gallery_training", "test_tools"),
            *("test_trajectories", "test_loops", "test_recording", "test_recorded_episodes"),
            *("test_client_bodies", "test_server", "test_tool_tokens"),
        ),
    ),
    "dialects": Area(
        files=("nanoinfer/dialects/*.py",),
        tests=(
            *("test_client_bodies", "test_client_fields"),
            *("test_endpoint_messages", "test_endpoint_responses", "test_unreadable_arguments"),
            *("test_server_dialects", "test_spoken_reply"),
            *("test_server_agent_clients", "test_recording_server", "test_recording"),
            *("test_call_variables", "test_agent_clients", "test_endpoint_abuse"),
        ),
    ),
    "serving": Area(
        files=("nanoinfer/server/*.py", "nanoinfer/http/*.py"),
        tests=(
            *("test_server", "test_client_bodies"),
            *("test_body_answers", "test_client_fields"),
            *("test_server_rl_routes", "test_server_dialects"),
            *("test_token_text", "test_answer_ends"),
            *("test_server_clients", "test_server_abuse"),
            *("test_chat_answers", "test_server_adapters"),
            *("test_request_fields_page", "test_chat_page"),
            *("test_server_fuzz", "test_listening", "test_monitor"),
            *("test_endpoint_flood", "test_http_replica", "test_llm"),
            *("test_http_client", "test_env_server"),
        ),
    ),
    "folders": Area(
        files=(
            *("nanoengine/adapters/peft_config.py", "nanoengine/adapters/lora.py"),
            *("nanoengine/adapters/patterns.py", "nanoengine/architectures/rope.py"),
            *("nanoengine/model/config.py", "nanoengine/formats/config_json.py"),
            *("nanoengine/formats/families.py", "nanoengine/formats/gguf*.py"),
            *("nanoengine/formats/mxfp4.py", "nanoengine/formats/chosen_dtype.py"),
            *("nanoengine/formats/template_files.py", "nanoengine/text/chat_template.py"),
        ),
        tests=(
            *("test_ropes", "test_drawn_fields"),
            *("test_peft_folders", "test_gguf"),
            *("test_gguf_tokenizer", "test_gguf_file"),
            *("test_finite_folders", "test_template_files"),
            *("test_hf", "test_gpt_oss", "test_llm"),
            *("test_model_parity", "test_foreign_files"),
            *("test_adapters", "test_template_gallery"),
        ),
    ),
    "outside": Area(
        files=(
            *(
                "nanorl/distributed/roles/outside_replica.py",
                "nanorl/distributed/roles/sglang_replica.py",
            ),
            *("nanorl/distributed/roles/vllm_replica.py", "nanorl/distributed/roles/servers.py"),
            *("nanorl/envs/tools/mcp*.py", "nanorl/agents/endpoint/call_count.py"),
            *("nanorl/inspection/doctor/borders.py", "nanorl/inspection/doctor/conversations.py"),
            *("nanorl/inspection/doctor/model_check.py", "nanorl/inspection/doctor/template_*.py"),
        ),
        tests=(
            *("test_outside_replica", "test_mcp_episodes", "test_mcp_tools", "test_given_up_calls"),
            *("test_template_gallery", "test_doctor", "test_http_replica", "test_recording"),
        ),
    ),
}
AREAS |= {
    "advantages": Area(
        files=(
            *("nanorl/algorithms/entropy_mask.py", "nanorl/algorithms/geometric_mean.py"),
            *("nanorl/algorithms/length_reward.py", "nanorl/algorithms/pass_at_k.py"),
            *("nanorl/algorithms/truncation.py", "nanorl/algorithms/distillation.py"),
        ),
        tests=(
            *("test_entropy_mask", "test_geometric_mean", "test_length_reward", "test_pass_at_k"),
            *("test_truncation", "test_recipe_references", "test_self_distillation"),
            *("test_split_independence", "test_losses", "test_learner"),
        ),
    ),
    "pairs": Area(
        files=(
            *("nanoengine/sft/objective.py", "nanoengine/sft/pair_*.py"),
            *("nanoengine/sft/preferences.py", "nanoengine/state/weight_average.py"),
            "nanorl/scorers/averaged_teacher.py",
        ),
        tests=(
            *("test_pair_loss", "test_preferences", "test_weight_average", "test_pair_runs"),
            *("test_self_distillation", "test_preference_chain", "test_sft_script"),
        ),
    ),
    "diagnosis": Area(
        files=("nanorl/observability/diagnosis/*.py", "nanorl/observability/alarms/alike.py"),
        tests=("test_learning_doctor", "test_doctor"),
    ),
    "mixes": Area(
        files=(
            *("nanorl/envs/mix.py", "nanorl/options/env_mix.py", "nanorl/options/mixed_kit.py"),
            *("nanorl/agents/mixed_agent.py", "nanorl/flow/difficulty_pools.py"),
        ),
        tests=("test_env_mix", "test_difficulty_pools", "test_several_environments"),
    ),
    "judges": Area(
        files=(
            *("nanorl/distributed/roles/judge_*.py", "nanorl/options/run_judges.py"),
            "nanorl/envs/rewards/judge_costs.py",
        ),
        tests=("test_judge_roles", "test_judge_reward", "test_placement"),
    ),
    "evaluations": Area(
        files=(
            *("nanorl/run/running_evaluation.py", "nanorl/run/evaluation_beside.py"),
            "nanorl/observability/report/rl_evaluations.py",
        ),
        tests=("test_running_evaluation", "test_report_html"),
    ),
}
GROUPS = {
    "learning": ("advantages", "pairs", "diagnosis", "mixes", "judges", "evaluations"),
    "clients": ("chat", "dialects", "serving", "folders", "outside"),
    "trust": (
        *("sandbox", "endpoint", "service", "store", "router", "supervision", "batching"),
        "recorder",
    ),
}
"""Areas that one list is drawn from."""
NEAR = {
    "nanoinfer/chat/turns.py": "test_turn_tokens",
    "nanoinfer/chat/reply.py": "test_reply",
    "nanoinfer/chat/form.py": "test_model_forms",
    "nanoinfer/chat": "test_parsers",
    "nanoinfer/server/rl_routes.py": "test_server_rl_routes",
    "nanoinfer/server/sglang_generate.py": "test_server_rl_routes",
    "nanoinfer/server/token_text.py": "test_token_text",
    "nanoengine/formats/gguf_tokenizer.py": "test_gguf_tokenizer",
    "nanoengine/formats/gguf": "test_gguf",
    "nanoengine/adapters/peft_config.py": "test_peft_folders",
    "nanoengine/formats/template_files.py": "test_template_files",
    "nanorl/envs/tools/mcp": "test_mcp_episodes",
    "nanorl/agents/endpoint/call_count.py": "test_given_up_calls",
    "nanorl/inspection/doctor": "test_template_gallery",
    "nanorl/agents/guard.py": "test_agent_command",
    "nanorl/batching.py": "test_batching",
    "nanoinfer/dialects/responses.py": "test_endpoint_responses",
    "nanoinfer/dialects/messages.py": "test_endpoint_messages",
    "nanorl/agents/endpoint/recording.py": "test_recording",
    "nanorl/agents/concurrency.py": "test_concurrency",
    "nanorl/flow/curriculum.py": "test_curriculum",
    "nanorl/flow/difficulty_pools.py": "test_difficulty_pools",
    "nanorl/flow/staleness.py": "test_staleness",
    "nanorl/flow": "test_transfer_queue",
    "nanorl/distributed/roles/cluster.py": "test_cluster_runs",
    **dict.fromkeys(
        (
            *(
                "nanorl/distributed/roles/trainer_ranks.py",
                "nanorl/distributed/roles/replica_set.py",
            ),
            *(
                "nanorl/distributed/roles/scoring_roles.py",
                "nanorl/distributed/roles/role_starter.py",
            ),
        ),
        "test_cluster_runs",
    ),
    "nanorl/distributed/roles/replica_role.py": "test_replica",
    "nanorl/sandbox/backends/wasi": "test_wasi_calls",
    "nanorl/sandbox/backends/wasm_module.py": "test_wasm_module",
    "nanorl/sandbox/backends/wasm": "test_sandbox_wasm",
    "nanorl/sandbox/backends": "test_sandbox_backends",
    "nanorl/sandbox/grading.py": "test_session_grading",
    "nanorl/sandbox/seccomp.py": "test_sandbox_seccomp",
    "nanorl/sandbox/usage.py": "test_sandbox_usage",
    "nanorl/sandbox/session.py": "test_session",
    "nanorl/sandbox": "test_sandbox_pool",
    "nanorl/observability/store/blobs.py": "test_store_blobs",
    "nanorl/observability/store/postgres.py": "test_store_postgres",
    "nanorl/serving/training_service/service_losses.py": "test_training_service_losses",
    "nanosched/ledger.py": "test_resources",
    "nanorl/algorithms/entropy_mask.py": "test_entropy_mask",
    "nanorl/algorithms/geometric_mean.py": "test_geometric_mean",
    "nanorl/algorithms/length_reward.py": "test_length_reward",
    "nanorl/algorithms/pass_at_k.py": "test_pass_at_k",
    "nanorl/algorithms/truncation.py": "test_truncation",
    "nanorl/algorithms/distillation.py": "test_recipe_references",
    "nanoengine/sft/pair_loss.py": "test_pair_loss",
    "nanoengine/sft/preferences.py": "test_preferences",
    "nanoengine/sft": "test_pair_runs",
    "nanoengine/state/weight_average.py": "test_weight_average",
    "nanosched": "test_local_processes",
}
"""The test file that is asked first, by the start of the changed file's name."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug of the list."""

    id: str
    area: str
    mutation: Mutation
    equivalent: str | None = None
    """Why nobody can see a difference, where that is so."""

    @staticmethod
    def of(row: Mapping[str, object]) -> Mutant:
        fields = dict(row)
        id, area, equivalent = (fields.pop(name) for name in ("id", "area", "equivalent"))
        return Mutant(id=id, area=area, mutation=Mutation(**fields), equivalent=equivalent)

    @property
    def row(self) -> dict[str, object]:
        head = {"id": self.id, "area": self.area}
        return head | asdict(self.mutation) | {"equivalent": self.equivalent}


# Drawing.


def shares(count: int, group: str = "trust") -> dict[str, int]:
    """How many bugs each area gets: as evenly as can be, the first ones more."""
    areas = GROUPS[group]
    each, rest = divmod(count, len(areas))
    return {area: each + (index < rest) for index, area in enumerate(areas)}


def sources_of(area: Area, commit: str) -> dict[str, str]:
    """The texts of an area's files as a commit has them."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout

    names = git("ls-tree", "-r", "--name-only", commit).splitlines()
    wanted = [
        name
        for name in names
        if any(Path(name).match(glob) for glob in area.files)
        and Path(name).name not in area.left_out
    ]
    return {name: git("show", f"{commit}:{name}") for name in wanted}


def drawn_of(area: str, sources: Mapping[str, str], seed: int, wanted: int,
             known: Mapping[str, str | None]) -> list[Mutant]:  # fmt: skip
    """The first of an area's draw, so many that `wanted` are no equivalents; `known` has the
    reasons of those that are, by id."""
    areas = next(areas for areas in GROUPS.values() if area in areas)
    area_seed = seed * len(areas) + areas.index(area)
    num_equivalent = sum(1 for id, why in known.items() if why and id.startswith(f"{area}-"))
    drawn = draw(sources, seed=area_seed, count=wanted + num_equivalent)
    ids = [f"{area}-{number:02d}" for number in range(1, len(drawn) + 1)]
    return [
        Mutant(id=id, area=area, mutation=mutation, equivalent=known.get(id))
        for id, mutation in zip(ids, drawn, strict=True)
    ]


def draw_list(path: Path, count: int, seed: int, group: str) -> None:
    """Write the list; one of the same seed that is there keeps its commit and its reasons."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    known: dict[str, str | None] = {}
    if path.exists():
        old = json.loads(path.read_text())
        if (old["seed"], old["count"]) == (seed, count):
            head = old["commit"]
            known = {row["id"]: row["equivalent"] for row in old["mutants"]}
    mutants = [
        mutant
        for area, wanted in shares(count, group).items()
        for mutant in drawn_of(area, sources_of(AREAS[area], head), seed, wanted, known)
    ]
    about = {"seed": seed, "count": count, "commit": head}
    rows = [mutant.row for mutant in mutants]
    path.write_text(json.dumps({**about, "mutants": rows}, indent=1) + "\n")


def read_list(path: Path) -> list[Mutant]:
    return [Mutant.of(row) for row in json.loads(path.read_text())["mutants"]]


# Running.


def tests_of(mutant: Mutant) -> list[str]:
    """The test files of a bug, the nearest first."""
    tests = list(AREAS[mutant.area].tests)
    near = next(
        (test for start, test in NEAR.items() if mutant.mutation.file.startswith(start)), ""
    )
    if near in tests:
        tests.sort(key=lambda test: test != near)
    return [str(_file_of_test(test)) for test in tests]


@functools.cache
def _file_of_test(name: str) -> Path:
    """Names of test files are distinct: whichever room it is in."""
    [file] = (ROOT / "tests").rglob(f"{name}.py")
    return file.relative_to(ROOT)


def stages_of(mutant: Mutant, first: Mapping[str, str]) -> tuple[list[str], ...]:
    """What is asked of a bug, while all bugs go through one stage before any enters the next."""
    likely = [first[mutant.id]] if mutant.id in first else []
    tests = tests_of(mutant)
    return likely, tests[:1], tests[1:]


class Copy:
    """A copy of the working tree, in which one bug at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def import_ahead(self, files: Sequence[str]) -> None:
        """What nearly all tests import and no bug is in: forked tests have it then. A package that
        has one of the changed `files` is imported by each test anew, else no test would see it."""
        sys.path.insert(0, str(self.folder))
        changed = {Path(file).parts[0] for file in files}
        layers = ("kernels", "nanoengine", "nanoinfer", "nanorl")  # each imports those before it
        lowest = min((layers.index(one) for one in changed if one in layers), default=len(layers))
        for name in AHEAD:
            if name.partition(".")[0] in layers[lowest:]:
                continue
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    def write(self, file: str, text: str) -> None:
        """Python takes a compiled file for that of a text of the same size and second."""
        path = self.folder / file
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def failure(self, tests: Sequence[str]) -> str | None:
        """The first test that fails of files or of tests by their names; None if all pass."""
        number = os.fork()
        if number == 0:
            self._become_pytest(tests)
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            pid, status = os.waitpid(number, os.WNOHANG)
            if pid:
                return self._first_failure(tests[0], os.waitstatus_to_exitcode(status))
            time.sleep(0.05)
        os.killpg(number, signal.SIGKILL)
        os.waitpid(number, 0)
        return f"{tests[0].split('::')[0]} hangs"

    def _become_pytest(self, tests: Sequence[str]) -> None:
        """In a child that has what all tests import: starting it anew would take longer."""
        os.setsid()
        os.chdir(self.folder)
        os.environ |= {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        scripts = str(ROOT / "scripts")
        sys.path[:] = [str(self.folder), *(path for path in sys.path if path != scripts)]
        with (self.folder / "tests.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        import pytest

        options = ("-x", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-rfE", "--timeout=100")
        status = 70
        try:
            status = int(pytest.main([*options, *tests]))
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _first_failure(self, test: str, status: int) -> str | None:
        if status in (0, 5):  # 5: every test of it is skipped here
            return None
        found = FIRST_LINE.search((self.folder / "tests.log").read_text(errors="replace"))
        return found[1] if found else f"{test} ends with status {status}"


def outcome_of(mutant: Mutant, tests: Sequence[str], copy: Copy) -> dict[str, object]:
    """What these tests say of one bug: "killed" and by which, "survived", or "gone"."""
    file = mutant.mutation.file
    clean = (copy.folder / file).read_text()
    start_s = time.monotonic()
    try:
        bug = apply(mutant.mutation, clean)
    except GoneError as error:
        return {"outcome": "gone", "killed_by": None, "why": str(error)}
    failed: str | None = None
    copy.write(file, bug)
    try:
        for test in tests:
            failed = copy.failure([test])
            if failed is not None:
                break
    finally:
        copy.write(file, clean)
    outcome = "survived" if failed is None else "killed"
    seconds = round(time.monotonic() - start_s)
    return {"outcome": outcome, "killed_by": failed, "seconds": seconds}


def run(mutants: Sequence[Mutant], rows: Path, round_name: str, first: Mapping[str, str]) -> None:
    """Add a line to `rows` for each bug that has none of this round and was not killed before.
    `first` are tests that are asked before all others, by the bug's id."""
    last = last_rows(rows)
    done = {
        id
        for id, row in last.items()
        if row["outcome"] == "killed" or (row["round"], row["outcome"]) == (round_name, "survived")
    }
    wanted = [mutant for mutant in mutants if not mutant.equivalent and mutant.id not in done]
    with tempfile.TemporaryDirectory(prefix="nanorl-mutants-") as folder:
        os.chmod(folder, 0o755)  # some tests run as another user
        copy = Copy(Path(folder))
        copy.import_ahead([mutant.mutation.file for mutant in wanted])
        for stage in range(NUM_STAGES):
            is_last = stage == NUM_STAGES - 1
            for mutant in wanted[:]:
                tests = stages_of(mutant, first)[stage]
                row = outcome_of(mutant, tests, copy)
                if row["outcome"] != "survived" or is_last:
                    wanted.remove(mutant)
                    add_row(rows, {"id": mutant.id, "round": round_name} | row)
            print(f"open after stage {stage}:", *(one.id for one in wanted), flush=True)
        confirm(rows, copy)


def confirm(rows: Path, copy: Copy) -> None:
    """Tests that killed must pass without the bug. What those killed that do not is open again."""
    last = last_rows(rows)
    unsure = {str(row["killed_by"]) for row in last.values() if row["outcome"] == "killed"}
    unsure -= {str(row["killed_by"]) for row in last.values() if row.get("confirmed")}
    files = {test.split("::")[0].removesuffix(" hangs") for test in unsure}
    failed: set[str] = set()
    for file in sorted(files):
        tests = sorted(test for test in unsure if test.startswith(file))
        nodes = [test if "::" in test else file for test in tests]
        while nodes and (one := copy.failure(nodes)) is not None:
            failed |= {one, *(tests if one not in nodes else ())}
            nodes = [node for node in nodes if node not in failed]
    for id, row in last.items():
        if row["killed_by"] in failed:
            add_row(rows, {"id": id, "round": row["round"], "outcome": "doubted",
                           "killed_by": row["killed_by"]})  # fmt: skip
        elif row["killed_by"] in unsure:
            add_row(rows, dict(row) | {"confirmed": True})


def add_row(rows: Path, row: dict[str, object]) -> None:
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def read_rows(rows: Path) -> list[dict[str, object]]:
    if not rows.exists():
        return []
    return [json.loads(line) for line in rows.read_text().splitlines()]


def last_rows(rows: Path) -> dict[str, dict[str, object]]:
    """The last line on each bug."""
    return {str(row["id"]): row for row in read_rows(rows)}


def write_figures(mutants: Sequence[Mutant], rows: Path, out: Path) -> None:
    """The last word on each bug, and how many were killed in which round."""
    last = last_rows(rows)
    real = [mutant for mutant in mutants if not mutant.equivalent]
    ends = [last.get(mutant.id, {"outcome": "not run", "round": None}) for mutant in real]
    killed: dict[str, int] = {}
    for end in ends:
        if end["outcome"] == "killed":
            killed[str(end["round"])] = killed.get(str(end["round"]), 0) + 1
    about = {
        "bugs": len(real),
        "killed_in_round": killed,
        "survived": [one.id for one, end in zip(real, ends, strict=True)
                     if end["outcome"] != "killed"],
        "equivalent": {one.id: one.equivalent for one in mutants if one.equivalent},
    }  # fmt: skip
    pairs = zip(real, ends, strict=True)
    found = [{"id": one.id, "file": one.mutation.file} | end for one, end in pairs]
    write_json(out, found, about=about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=int, metavar="N", help="write a list of N bugs")
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--group", choices=GROUPS, default="trust", help="the areas to draw from")
    parser.add_argument("--list", type=Path, default=LIST)
    parser.add_argument("--run", action="store_true", help="plant the bugs and run the tests")
    parser.add_argument("--only", nargs="*", metavar="ID", help="of these bugs alone")
    parser.add_argument("--round", default="before", help="a word for the tests as they are now")
    parser.add_argument("--rows", type=Path, help="one line of JSON for each bug that was run")
    parser.add_argument("--first", type=Path, help="JSON: the test to begin with, by a bug's id")
    parser.add_argument("--figures", action="store_true", help="write what `--rows` comes to")
    today = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=ROOT / f"benchmarks/mutants_{today}.json")
    given = parser.parse_args()
    if given.draw:
        draw_list(given.list, given.draw, given.seed, given.group)
    if (given.run or given.figures) and given.rows is None:
        parser.error("--rows: name the file for the outcomes, such as --rows rows.jsonl")
    if given.run:
        mutants = read_list(given.list)
        wanted = [one for one in mutants if not given.only or one.id in given.only]
        first = json.loads(given.first.read_text()) if given.first else {}
        run(wanted, given.rows, given.round, first)
    if given.figures:
        write_figures(read_list(given.list), given.rows, given.out)


if __name__ == "__main__":
    main()
