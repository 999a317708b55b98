#!/usr/bin/env bash
# The door as a stranger finds it, in each Python: a fresh clone, an empty home, none of pip's
# settings; the README's first command (tiny, two steps); pip check; then the wheel in a folder and an
# environment of its own: nanorl new, its test, check, train, view. Seconds and sizes go to FILE.json,
# whose other rows are kept.
# Run it by hand before a release: a CUDA build downloads 2.8 GB and takes 5 GB, removed at its end.
#   bash scripts/test_pythons.sh FILE.json python3.11 python3.12 python3.13
#   NANORL_TORCH_INDEX=FOLDER bash scripts/test_pythons.sh FILE.json python3.11   a CPU build
#   KEEP=1 ...     leaves the folders
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/setup_env.sh"
file="$(realpath -m "${1:?usage: test_pythons.sh FILE.json PYTHON ...}")"
shift
[ $# -gt 0 ] || die "no Python is named." "E.g. bash $0 out.json python3.11 python3.12 python3.13"
short=(--preset tiny --warm-start.steps 2 --rl.steps 2 --rl.tasks-per-step 2 --evaluation.num-tasks 4
    --evaluation.num-tasks-untrained 2 --evaluation.num-tasks-no-tool 2 --keep-checkpoints 1)
temporary="$(mktemp -d)"
[ -n "${KEEP:-}" ] || trap 'rm -rf "$temporary"' EXIT
figures="$temporary/figures.tsv"

alone() { # a command of a stranger, who has no settings and nothing in the home
    env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL -u PYTHONDONTWRITEBYTECODE -u PYTHONPATH -u VIRTUAL_ENV \
        PIP_CONFIG_FILE=/dev/null HOME="$home" "$@"
}

figure() { printf '%s\t%s\t%s\n' "$label: $1" "$2" "$3" | tee -a "$figures"; }

timed() { # what it is, its command
    local start end
    start="$(date +%s.%N)"
    "${@:2}" >"$folder/log" 2>&1 || { tail -40 "$folder/log" >&2 && die "$label: $1 failed: ${*:2}"; }
    end="$(date +%s.%N)"
    figure "$1" "$(awk "BEGIN { print $end - $start }")" s
}

megabytes() { du -sm "$1" | cut -f1; }

downloaded() { # megabytes, from pip's log: "Downloading torch-2.13.0-....whl (526.6 MB)"
    sed -n 's/.*Downloading .*(\([0-9.]*\) \([kM]B\))$/\1 \2/p' "$1" |
        awk '{ sum += $2 == "MB" ? $1 : $1 / 1000 } END { print sum }'
}

try_clone() { # the README's first command
    cd "$folder/clone"
    timed "set-up" alone env PIP_LOG="$folder/pip.log" bash -c 'source scripts/setup_env.sh; setup_env start'
    figure "environment" "$(megabytes .venv)" MB
    figure "downloaded" "$(downloaded "$folder/pip.log")" MB
    timed "two steps of tiny" alone bash scripts/train_agent.sh "${short[@]}" --out runs/first
    timed "pip check" alone .venv/bin/python -m pip check
}

try_wheel() { # what a package of ours does far from its source
    local wheels=("$folder"/dist/*.whl) python="$folder/clone/.venv/bin/python" bin="$folder/elsewhere/bin"
    alone "$python" -m pip uninstall --quiet --yes nanorl-stack
    # Packages are read from the clone's environment, that 5 GB are not fetched again.
    alone "$python" -m venv "$folder/elsewhere"
    printf '%s\n' "$folder"/clone/.venv/lib/python3.*/site-packages \
        >"$(echo "$folder"/elsewhere/lib/python3.*/site-packages)/clone.pth"
    mkdir "$folder/work"
    cd "$folder/work"
    timed "wheel: install" alone "$bin/python" -m pip install --quiet "${wheels[0]}[start]"
    alone "$bin/python" -c "import nanorl, sys; sys.exit('elsewhere' not in nanorl.__file__)" ||
        die "$label: the wheel's nanorl is not the one that is imported"
    timed "wheel: --version" alone "$bin/nanorl" --version
    timed "wheel: new" alone "$bin/nanorl" new hangman
    timed "wheel: the test that new wrote" alone "$bin/python" -m pytest -q
    timed "wheel: check" alone "$bin/nanorl" check --env hangman.py
    timed "wheel: two steps of tiny" alone "$bin/nanorl" train "${short[@]}" --out runs/first
    timed "wheel: view" alone "$bin/nanorl" view runs/first --worst
    timed "wheel: view --help" alone "$bin/nanorl" view --help
}

build="with CUDA"
[ -z "${NANORL_TORCH_INDEX:-}" ] || build="for CPUs"
for python in "$@"; do
    export NANORL_PYTHON="$python"
    label="Python $(version_of "$python"), torch $build"
    folder="$temporary/$(version_of "$python")"
    home="$folder/home"
    mkdir -p "$home"
    git clone --quiet "$root" "$folder/clone"
    try_clone
    timed "wheel: build" alone .venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation \
        --wheel-dir "$folder/dist" .
    try_wheel
    cd "$root"
    [ -n "${KEEP:-}" ] || rm -rf "$folder"
done

PYTHONPATH="$root/scripts" "$(find_python)" - "$figures" "$file" <<'EOF'
import json
import sys
from pathlib import Path

from bench_output import write_json

figures, file = map(Path, sys.argv[1:])
new = [line.split("\t") for line in figures.read_text().splitlines()]
rows = json.loads(file.read_text())["rows"] if file.exists() else []
rows = [row for row in rows if row["name"] not in {name for name, _, _ in new}]
rows += [{"name": name, "value": float(value), "unit": unit} for name, value, unit in new]
sys.argv[:] = ["test_pythons.sh", file.name, "python3.11 python3.12 python3.13, a build of torch a call"]
write_json(file, rows)
EOF
