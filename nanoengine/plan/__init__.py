"""Arithmetic before a run: what a layout takes of memory and time."""
