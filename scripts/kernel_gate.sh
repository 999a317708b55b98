#!/usr/bin/env bash
# The compile gate with two versions of Triton, whichever the environment has.
# Arguments go to kernel_gate.py, e.g. --json benchmarks/kernels_compile_2026-01-31.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
for version in 3.9.0 3.6.0; do # as torch's builds bring others, each has a folder of its own
    triton=".venv/triton-$version"
    if [ ! -f "$triton/.installed" ]; then
        say "installing triton $version beside the environment"
        "$PYTHON" -m pip install --quiet --no-deps --require-hashes --target "$triton" \
            -r "locks/triton-$version.txt"
        touch "$triton/.installed"
    fi
    say "compile gate, triton $version"
    PYTHONPATH="$triton" "$PYTHON" scripts/kernel_gate.py "$@"
done
