#!/usr/bin/env bash
# Teaches the form by chats: half of its answers are short.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash scripts/train_sft.sh --data examples/preferences/chats.jsonl \
    --steps 12 --out runs/preferences/sft "$@"
