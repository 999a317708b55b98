"""The GPU kernels in Triton, one file an op; imported when a GPU first needs them."""
