#!/usr/bin/env bash
# The compile gate with two versions of Triton, whichever the environment has.
# Arguments go to kernel_gate.py, e.g. --json benchmarks/kernels_compile_2026-01-31.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
for version in 3.9.0 3.6.0; do
    folder=".venv/triton-$version" # beside the environment, whose torch has a Triton of its own
    "$PYTHON" -c "import triton; assert triton.__version__ == '$version'" 2>/dev/null && folder=""
    if [ -n "$folder" ] && [ ! -f "$folder/.installed" ]; then
        say "installing triton $version beside the environment"
        pip_install "$PYTHON" --no-deps --require-hashes --target "$folder" \
            -r "locks/triton-$version.txt"
        touch "$folder/.installed"
    fi
    say "compile gate, triton $version"
    PYTHONPATH="$folder" "$PYTHON" scripts/kernel_gate.py "$@"
done
