"""The dense model: its shape, its matrices, attention over a context, layers, and the whole."""
