"""The GPU kernels in Triton: one file an op, named as the op; imported when a GPU first needs them."""
