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
if [ $# -gt 0 ]; then # they may name one file for both
    say "compile gate, triton of the environment"
    "$PYTHON" scripts/kernel_gate.py "$@"
    say "compile gate, triton 3.6.0"
    PYTHONPATH="$old" "$PYTHON" scripts/kernel_gate.py "$@"
    exit
fi
say "compile gate, triton of the environment, and 3.6.0 beside it"
output="$(mktemp)"
PYTHONPATH="$old" "$PYTHON" scripts/kernel_gate.py >"$output" 2>&1 &
other=$!
trap 'kill "$other" 2>/dev/null || true; rm -f "$output"' EXIT
"$PYTHON" scripts/kernel_gate.py
failed=0
wait "$other" || failed=$?
cat "$output"
exit "$failed"
