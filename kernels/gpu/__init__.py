"""The host's part of the GPU path: what the kernels of `triton/` are given, made on a CPU."""
