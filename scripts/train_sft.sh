#!/usr/bin/env bash
# Sets everything up on a fresh machine and fine-tunes a model on chats. All options: --help.
#   bash scripts/train_sft.sh --data chats.jsonl                      one process
#   bash scripts/train_sft.sh --data chats.jsonl --dp 2 --zero 1      two processes on this machine
#   bash scripts/train_sft.sh --data chats.jsonl --pp 2 --tp 2        four, split by layers and heads
#   bash scripts/train_sft.sh --resume --out runs/sft                 goes on, in any layout
# Several machines: torchrun ... scripts/train_sft.py with the same options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env start
exec "$PYTHON" scripts/train_sft.py "$@"
