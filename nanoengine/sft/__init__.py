"""Supervised fine-tuning: chats (chats.py) or pairs of answers (preferences.py, pair_loss.py) as
samples, and a run over them (sft_run.py) with an objective (objective.py, pair_objectives.py)."""
