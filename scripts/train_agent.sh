#!/usr/bin/env bash
# Sets everything up on a fresh machine and trains an agent. All options: --help.
#   bash scripts/train_agent.sh                          the default preset, SmolLM2-135M
#   bash scripts/train_agent.sh --preset tiny            no model to download, about five minutes
#   bash scripts/train_agent.sh --resume --out runs/X    goes on where run X stopped
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env start
exec "$PYTHON" scripts/train_agent.py "$@"
