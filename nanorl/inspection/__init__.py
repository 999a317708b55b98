"""Looks at runs that are, or were: doctor (faults of a machine, a model, a run), viewer (rollouts
in a browser), replay (every token again), simulate (what other settings would take),
export_trajectories.py (rollouts in other tools' formats)."""
