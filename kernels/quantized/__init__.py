"""Products with weights of eight bits: fp8 with scales of blocks, int8 with one of each output."""
