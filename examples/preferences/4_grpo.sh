#!/usr/bin/env bash
# Trains the policy of the first step on what the reward model says.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
.venv/bin/nanorl train --model runs/preferences/sft/model --warm-start.steps 0 \
    --env answer --tasks examples/preferences/tasks.jsonl \
    --reward model --reward-args folder=runs/preferences/reward_model/model \
    --out runs/preferences/grpo "$@"
