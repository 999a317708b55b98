"""The ops in PyTorch: their definitions (`*_ref`), and the way where neither C++ nor Triton runs.

A file has the name of the op that it belongs to. Every import in these packages is absolute, so
`import torch` here is PyTorch.
"""
