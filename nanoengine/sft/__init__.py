"""Supervised fine-tuning: chats as samples (chats.py), and a run over them (sft_run.py)."""
