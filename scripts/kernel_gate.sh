#!/usr/bin/env bash
# The compile gate with every supported Triton: the installed one, and the one of GPU machines.
# Arguments go to kernel_gate.py, e.g. --json benchmarks/kernels_compile_2026-01-31.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
old=".venv/triton-3.6.0"
if [ ! -f "$old/.installed" ]; then
    say "installing triton 3.6.0 beside the environment"
    "$PYTHON" -m pip install --quiet --no-deps --target "$old" triton==3.6.0
    touch "$old/.installed"
fi
say "compile gate, triton of the environment"
"$PYTHON" scripts/kernel_gate.py "$@"
say "compile gate, triton 3.6.0"
PYTHONPATH="$old" "$PYTHON" scripts/kernel_gate.py "$@"
