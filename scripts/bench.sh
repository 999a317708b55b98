#!/usr/bin/env bash
# Benchmarks: bash scripts/bench.sh rl|infer|train|sandbox|sched|... [--json FILE] [--peers] [...]
# With --peers the peers are installed into .venv-peers* and run side by side in the same run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

name="${1:-}"
[ -f "scripts/bench_$name.py" ] && [ "$name" != output ] || die "no benchmark named '$name'." \
    "There are: $(ls scripts/bench_*.py | sed 's/.*bench_//; s/\.py//' | grep -v output | tr '\n' ' ')"
shift
setup_env start
install_peers() { # folder of the environment, its requirements; further packages to remove
    [ -f "$1/.installed" ] && return
    say "installing peers into $1"
    "$(find_python)" -m venv "$1"
    "$1/bin/python" -m pip install --quiet -c constraints.txt torch==2.13.0
    "$1/bin/python" -m pip install --quiet -r "scripts/peers/$2"
    [ $# -eq 2 ] || "$1/bin/python" -m pip uninstall --quiet --yes "${@:3}"
    touch "$1/.installed"
}

case " $* " in *" --peers "*)
    if [ "$name" = sched ]; then
        setup_env start,ray # Ray is measured with the same interpreter
    else
        install_peers .venv-peers requirements.txt
        # vLLM pulls builds of these three for another torch, with which it cannot be imported.
        [ "$name" != infer ] || install_peers .venv-peers-vllm requirements-vllm.txt \
            torchvision torchaudio torchcodec
    fi ;;
esac
exec "$PYTHON" "scripts/bench_$name.py" "$@"
