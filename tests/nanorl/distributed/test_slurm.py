"""The Slurm script against commands that only write down what they were asked for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "slurm" / "train_agent.sbatch"

# One write for each line: several of them run at once.
NOTE = """line="${0##*/}"; for one; do line+=$'\\t'"$one"; done; echo "$line" >>"$LOG"
"""
FAKES = {
    "scontrol": "printf 'node1\\nnode2\\nnode3\\n'",
    "hostname": 'case "$1" in --ip-address) echo 127.0.1.1 ;; *) echo 10.0.0.1 192.168.0.1 ;; esac',
    "srun": NOTE + 'while [ "${1##*/}" != ray ]; do shift; done; exec "$@"',
    # It ends as a killed step does.
    "ray": NOTE
    + 'printf "token\\t%s\\n" "$RAY_AUTH_TOKEN" >>"$LOG"; echo $$ >>"$PIDS"; exec sleep 300',
    "python": 'case "$1" in -c) echo secret ;; -) ;; *) '
    + NOTE
    + 'trap "sleep 0.3; touch $LOG.saved; exit 130" TERM; touch "$LOG.driver"; eval "$DRIVER"; '
    + "exit 3 ;; esac",
}


UNTIL_RAY_IS_THERE = 'until [ "$(cat "$PIDS" | wc -l)" = 2 ]; do sleep 0.05; done'
FOREVER = "while true; do sleep 0.05; done"
LATE = """set -o functrace; trap 'case $BASH_COMMAND in "$LATE"*) sleep 1 ;; esac' DEBUG"""


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    """Ends what a script that failed has left behind."""
    yield
    if (group := tmp_path / "group").exists():
        with suppress(ProcessLookupError):
            os.killpg(int(group.read_text()), signal.SIGKILL)


def start(
    folder: Path, *arguments: str, driver: str, late: str = "nothing"
) -> subprocess.Popen[bytes]:
    """The batch script on a paper cluster of three nodes; it logs into `folder`/log, and `driver`
    is what the run does there. The script is held up for a second before each of its commands that
    begin with `late`."""
    bin_folder, submitted = folder / "bin", folder / "repository"
    for name, text in FAKES.items():
        path = bin_folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    (submitted / "scripts").mkdir(parents=True)
    (submitted / "scripts" / "train_agent.py").touch()
    set_up = f"""PYTHON="{bin_folder}/python"; echo "extras+$1" | tr + '\\t' >>"$LOG" """
    (submitted / "scripts" / "setup_env.sh").write_text(f"setup_env() {{ {set_up}; }}\n")
    spooled = folder / "slurm_script"  # Slurm runs a copy that lies elsewhere
    shutil.copy(SCRIPT, spooled)
    (folder / "late").write_text(f"{LATE}\n")
    environment = {
        **{"BASH_ENV": str(folder / "late"), "LATE": late},
        **{"PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(folder)},
        **{"LOG": str(folder / "log"), "PIDS": str(folder / "pids"), "DRIVER": driver},
        **{"SLURM_SUBMIT_DIR": str(submitted), "SLURM_JOB_ID": "123456"},
        **{"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_CPUS_ON_NODE": "96"},
        **{"SLURM_GPUS_ON_NODE": "8"},
    }
    command = ["bash", str(spooled), *arguments]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # nohup ignores it
    job = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=listen)
    (folder / "group").write_text(str(job.pid))
    return job


def logged(folder: Path, program: str) -> list[list[str]]:
    lines = [line.split("\t") for line in (folder / "log").read_text().splitlines()]
    return [line[1:] for line in lines if line[0] == program]


def steps(folder: Path) -> list[str]:
    """The processes that Ray's two steps became."""
    return (folder / "pids").read_text().split() if (folder / "pids").exists() else []


def steps_alive(folder: Path) -> list[str]:
    return [pid for pid in steps(folder) if Path(f"/proc/{pid}").exists()]


def test_it_is_a_program_that_bash_understands() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0


def test_ray_starts_on_every_node_and_the_run_gets_its_address_and_options(tmp_path: Path) -> None:
    given = ("--out", "a folder/x", "--learner.dp", "16", "--cluster.placement", "separate")
    job = start(tmp_path, *given, driver=UNTIL_RAY_IS_THERE)
    assert job.wait(60) == 3  # the run's own status
    address = "10.0.0.1:23456"
    (driver,) = logged(tmp_path, "python")
    ours = ["scripts/train_agent.py", "--cluster.backend", "ray", "--cluster.address", address]
    assert driver == [*ours, *given]
    head, others = sorted(logged(tmp_path, "srun"), key=lambda line: "--exclude" in line)
    step = ["--overlap", "--cpus-per-task", "96"]
    assert head[:9] == [*step, "--nodes", "1", "--ntasks", "1", "--nodelist", "node1"]
    assert others[:9] == [*step, "--nodes", "2", "--ntasks", "2", "--exclude", "node1"]
    sizes = ["--num-cpus", "96", "--num-gpus", "8", "--disable-usage-stats", "--block"]
    on_head, on_others = sorted(logged(tmp_path, "ray"), key=lambda line: "--address" in line)
    assert on_head[:6] == ["start", "--head", "--node-ip-address", "10.0.0.1", "--port", "23456"]
    assert on_head[-len(sizes) :] == sizes
    assert on_others == ["start", "--address", address, *sizes]
    assert logged(tmp_path, "token") == [["secret"]] * 2
    assert logged(tmp_path, "extras") == [["start,hub,ray,monitor,alerts"]]
    assert steps_alive(tmp_path) == []


@pytest.mark.parametrize("late", ["nothing", "driver=$", "kill -0"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_of_its_time_asks_the_run_to_save_and_waits_for_it(
    tmp_path: Path, number: signal.Signals, late: str
) -> None:
    """Also where the script has not noted the run's number yet, and where the run has ended before
    the script looks."""
    job = start(tmp_path, driver=FOREVER, late=late)
    wait_until(lambda: (tmp_path / "log.driver").exists() and len(steps(tmp_path)) == 2)
    job.send_signal(number)
    assert job.wait(60) == 130
    assert (tmp_path / "log.saved").exists()
    assert steps_alive(tmp_path) == []


def test_a_job_from_elsewhere_is_told_so(tmp_path: Path) -> None:
    environment = {**os.environ, "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "submit this from the repository's folder" in done.stderr
