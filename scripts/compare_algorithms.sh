#!/usr/bin/env bash
# Sets everything up and compares algorithms: same tasks, seeds and budget. All options: --help.
#   bash scripts/compare_algorithms.sh                                  every recipe, three seeds
#   bash scripts/compare_algorithms.sh --algorithms grpo gspo --steps 12 --seeds 0
#   bash scripts/compare_algorithms.sh --variants staleness --jobs 2    goes on where it was stopped
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env start
exec "$PYTHON" scripts/compare_algorithms.py "$@"
