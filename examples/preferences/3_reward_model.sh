#!/usr/bin/env bash
# Trains a reward model on the same pairs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash scripts/train_sft.sh --loss reward_model --preferences examples/preferences/pairs.jsonl \
    --model runs/preferences/sft/model --steps 30 --out runs/preferences/reward_model "$@"
