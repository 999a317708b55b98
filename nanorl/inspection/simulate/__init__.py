"""Simulates runs on clusters that one does not have: the real scheduling code on a virtual clock.

    python -m nanorl.inspection.simulate --config verl-128-async

docs/simulation.md says what is real in it and what is modelled. Next: simulation.py.
"""
