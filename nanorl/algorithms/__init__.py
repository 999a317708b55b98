"""The mathematics of the update, as pure functions on packed tensors. Read `spec.py` first."""
