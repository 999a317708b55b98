"""Ops over the paged cache that a model calls layer by layer: write to it, attend over it."""
