#!/usr/bin/env bash
# Sets everything up and runs public protocols on SmolLM2-135M, three seeds each. All options: --help.
#   bash scripts/protocols.sh                                  an afternoon on a laptop
#   bash scripts/protocols.sh --protocols reverse_text --seeds 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env start,reasoning-gym
exec "$PYTHON" scripts/protocols.py "$@"
