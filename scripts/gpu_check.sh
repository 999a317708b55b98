#!/usr/bin/env bash
# On a machine with a GPU: tests, training, server, NCCL, MFU and benchmarks in under 9 minutes; one
# JSON with a verdict. Parts: bash scripts/gpu_check.sh --parts tests,mfu [--json gpu_check.json]
# Installs nothing: it uses the Python it finds, which needs torch >= 2.11, triton >= 3.6 and pytest
# (for the training and the server what setup.py lists).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python="$(command -v python3 || command -v python)"
exec "$python" scripts/gpu_check.py "$@"
