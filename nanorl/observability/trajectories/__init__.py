"""Trajectories: the stored rollouts of a run, in formats that other tools read.

frames.py   `ChatFrames`: messages read back out of tokens, the inverse of a chat template
base.py     `Trajectory`: a rollout as messages, turns, calls and results; `TrajectoryReader`
jsonl.py    a rollout a line, as chats for supervised training with every token's numbers beside
parquet.py  the same as columns
atif.py     the Agent Trajectory Interchange Format, a JSON file a rollout
otel.py     OpenTelemetry spans by the conventions for generative AI, a trace a rollout
files.py    a file or a folder that is there as a whole or not at all
"""
