#!/usr/bin/env bash
# Sets everything up and runs the whole CPU test suite. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
say "tests (two processes, one thread each)"
exec "$PYTHON" -m pytest "$@"
