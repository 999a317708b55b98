#!/usr/bin/env bash
# Trains the policy of the first step on pairs, of which the short answer was preferred.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash scripts/train_sft.sh --loss dpo --preferences examples/preferences/pairs.jsonl \
    --model runs/preferences/sft/model --steps 30 --out runs/preferences/dpo "$@"
