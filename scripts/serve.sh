#!/usr/bin/env bash
# Sets everything up and serves a model over HTTP (OpenAI's protocol). All options: --help.
#   bash scripts/serve.sh --model path/to/hf-folder
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env start,grammar
exec "$PYTHON" -m nanoinfer.server "$@"
