#!/usr/bin/env bash
# Serves what the fourth step trained; --model-name and all other options of nanorl serve.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
.venv/bin/nanorl serve runs/preferences/grpo "$@"
