#!/usr/bin/env bash
# Benchmarks: bash scripts/bench.sh rl|infer|train|sandbox|... [--json FILE] [--peers] [...]
# With --peers the peers are installed into .venv-peers and run side by side in the same run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

name="${1:-}"
[ -f "scripts/bench_$name.py" ] && [ "$name" != output ] || die "no benchmark named '$name'." \
    "There are: $(ls scripts/bench_*.py | sed 's/.*bench_//; s/\.py//' | grep -v output | tr '\n' ' ')"
shift
setup_env gguf
case " $* " in *" --peers "*)
    if [ ! -f .venv-peers/.installed ]; then
        say "installing the peers into .venv-peers"
        "$(find_python)" -m venv .venv-peers
        .venv-peers/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0
        .venv-peers/bin/python -m pip install --quiet -r scripts/peers/requirements.txt
        touch .venv-peers/.installed
    fi ;;
esac
exec "$PYTHON" "scripts/bench_$name.py" "$@"
